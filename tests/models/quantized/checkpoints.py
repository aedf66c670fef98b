# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny model with quantized linear layers, and the floats that they stand for beside it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.layers.matrix import MatrixLayer
from quire.models.base import CausalLM
from quire.models.weight_files import SINGLE_NAME
from tests.models.harness import load_tiny, logits_of

Writer = Callable[[Tensor, torch.Generator], tuple[dict[str, Tensor], Tensor]]
"""A matrix [N, K] -> the tensors that a method makes of it, and, by its definer, the floats that these stand for."""

IDS = [[1, 17, 50, 3, 99, 120, 7, 7, 31]]


def write(
    source: Path, directory: Path, config: dict[str, Any], writer: Writer, only: Callable[[str], bool]
) -> tuple[Path, Path]:
    """The checkpoint of `source` with the linear layers that `only` takes by name quantized, and with their floats."""
    random = torch.Generator().manual_seed(0)
    quantized, floats = load_file(source / SINGLE_NAME), load_file(source / SINGLE_NAME)
    matrices = [name for name, tensor in floats.items() if tensor.dim() == 2 and "embed" not in name]
    for name in matrices:
        module = name.removesuffix(".weight")
        if only(module):
            tensors, stands_for = writer(quantized.pop(name), random)
            quantized |= {f"{module}.{key}": value.contiguous() for key, value in tensors.items()}
            floats[name] = stands_for.float().contiguous()
    says = json.loads((source / "config.json").read_text())
    for kind, tensors, more in (
        ("quantized", quantized, {"quantization_config": config}),
        ("floats", floats, {}),
    ):
        (directory / kind).mkdir(parents=True)
        (directory / kind / "config.json").write_text(json.dumps(says | more))
        save_file(tensors, directory / kind / SINGLE_NAME)
    return directory / "quantized", directory / "floats"


@torch.inference_mode()
def error_of_logits(quantized: Path, floats: Path, **options: Any) -> float:
    """The largest difference from transformers' logits in float32, relative to the largest of these."""
    expected = _oracle(floats)(torch.tensor(IDS)).logits[0]
    precise = {"quantization_config": {"mode": "precise"}}
    got = logits_of(load_tiny(quantized, **precise | options), IDS, chunk_sizes=[5])[0]
    return float((got - expected).abs().max() / expected.abs().max())


def _oracle(floats: Path) -> Any:
    """Return transformers' model of a checkpoint; those of one Llama config are one model with other weights."""
    from transformers import AutoModelForCausalLM

    config = (floats / "config.json").read_text()
    if json.loads(config)["architectures"] != ["LlamaForCausalLM"]:
        return AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    model = _llama_of(config)
    model.load_state_dict(load_file(floats / SINGLE_NAME))
    return model


@functools.cache
def _llama_of(config: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**json.loads(config))).float().eval()


def same(one: CausalLM, other: CausalLM, *, tolerance: float = 0.0) -> None:
    """Check that two models hold the same weights: bit by bit, or within a tolerance if matmuls round differently."""
    for (_, ours), (_, theirs) in zip(one.checkpoint_layers(), other.checkpoint_layers(), strict=True):
        if isinstance(ours, MatrixLayer) and isinstance(theirs, MatrixLayer):
            pairs = [(layer.unpacked().float() for layer in (ours, theirs))]
        else:
            got, want = ours.tensors(), theirs.tensors()
            assert got.keys() == want.keys()
            pairs = [(got[name], want[name]) for name in want]
        for mine, yours in pairs:
            torch.testing.assert_close(mine, yours, rtol=tolerance, atol=tolerance / 10, msg=ours.name)
