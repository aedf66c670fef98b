# SPDX-License-Identifier: Apache-2.0
"""gpt-oss as Unsloth has it for bitsandbytes: every expert's matrices, and the router's, are linear layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.layers.experts import Expert
from quire.layers.shard import Shard
from quire.models.loader import load_model
from quire.models.weight_files import SINGLE_NAME
from tests.models.harness import load_tiny, prepared_config
from tests.models.quantized.checkpoints import Writer, error_of_logits, same
from tests.models.quantized.test_published_encodings import bnb_4bit, bnb_int8

BNB = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head", "router", "self_attn"]}
FOUR = BNB | {"load_in_4bit": True}
FORMS: dict[str, tuple[dict[str, Any], Writer | None, str]] = {
    "floats": ({}, None, "float"),
    "nf4": (FOUR | {"bnb_4bit_quant_type": "nf4"}, bnb_4bit("nf4", nested=False), "nf4"),
    "nf4-nested": (
        FOUR | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        bnb_4bit("nf4", nested=True),
        "nf4",
    ),
    "fp4": (FOUR | {"bnb_4bit_quant_type": "fp4"}, bnb_4bit("fp4", nested=False), "fp4"),
    "int8": (BNB | {"load_in_8bit": True}, bnb_int8, "int8"),
}


def write(source: Path, directory: Path, config: dict[str, Any], writer: Writer | None) -> tuple[Path, Path]:
    """The model in lists, quantized, and as transformers has it, with the floats that these stand for."""
    random = torch.Generator().manual_seed(0)
    floats = load_file(source / SINGLE_NAME)
    listed: dict[str, Tensor] = {}
    for name, stack in list(floats.items()):
        path, _, leaf = name.rpartition(".")
        if path.endswith(".router"):
            listed[f"{path}.linear.{leaf}"] = stack
        elif leaf.endswith("_proj_bias"):
            modules = f"{path}.{leaf.removesuffix('_bias')}s"
            listed |= {f"{modules}.{index}.bias": bias.clone() for index, bias in enumerate(stack)}
        elif path.endswith(".experts"):
            for index, expert in enumerate(stack):
                weight = expert.t().contiguous()
                tensors, stands_for = (
                    ({"weight": weight}, weight) if writer is None else writer(weight, random)
                )
                listed |= {f"{name}s.{index}.{key}": each.contiguous() for key, each in tensors.items()}
                floats[name][index] = stands_for.t()
        else:
            listed[name] = stack
    says = json.loads((source / "config.json").read_text())
    for kind, each, more in (("listed", listed, {"quantization_config": config}), ("floats", floats, {})):
        (directory / kind).mkdir(parents=True)
        (directory / kind / "config.json").write_text(json.dumps(says | (more if config else {})))
        save_file(each, directory / kind / SINGLE_NAME)
    return directory / "listed", directory / "floats"


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_the_floats(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    config, writer, kind = FORMS[name]
    listed, floats = write(tiny_model("gptoss"), tmp_path, config, writer)
    model = load_tiny(listed)
    same(model, load_tiny(floats), tolerance=1e-6)
    kinds = {
        layer.matrix().scheme.kind
        for each in model.modules()
        if isinstance(each, Expert)
        for layer in (each.gate_up_proj, each.down_proj)
    }
    assert kinds == {kind}
    assert error_of_logits(listed, floats) < 1e-4


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_share_the_experts(
    name: str, rank: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    config, writer, _ = FORMS[name]
    paths = write(tiny_model("gptoss"), tmp_path, config, writer)
    shared = {"enable_expert_parallel": "4bit" in str(config)}  # half of what an expert reads is no block
    same(*(load_model(prepared_config(path, **shared), Shard(rank, 2)) for path in paths), tolerance=1e-6)


def test_adapters_use_names_of_transformers(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    listed, floats = write(tiny_model("gptoss"), tmp_path, *FORMS["floats"][:2])
    ours, theirs = ([names for names, _, _ in load_tiny(path).adapter_layers()] for path in (listed, floats))
    assert ours == theirs
