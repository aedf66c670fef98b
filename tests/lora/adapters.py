# SPDX-License-Identifier: Apache-2.0
"""Adapters in the layout of PEFT, full of random numbers, and what transformers computes once they are merged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fixtures.tiny_models import oracle_of

Shapes = Mapping[str, tuple[int, int]]
"""Module -> its outputs and inputs; a table of rows, which is called as an embedding is, has tokens for inputs."""


EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings")
"""Ends of the names of tables of tokens' rows."""


def table_shapes(oracle: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """The tables of a model of transformers that have a row for each token."""
    return {
        name: (module.embedding_dim, module.num_embeddings)
        for name, module in oracle.named_modules()
        if isinstance(module, torch.nn.Embedding) and name.endswith(EMBEDDINGS)
    }


def linear_shapes(oracle: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """The linear modules of a model of transformers."""
    shapes = {}
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear):
            shapes[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            shapes[name] = (module.nf, module.nx)
    return shapes


def write_adapter(directory: Path, shapes: Shapes, *, rank: int = 4, seed: int = 0, **config: Any) -> Path:
    """An adapter of these modules, whose options may differ from PEFT's defaults; changes outputs by about a half.

    With `use_dora` the modules have magnitudes, with `lora_bias` their products biases, and with a `bias` all of them
    biases of their own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"} | config
    (directory / "adapter_config.json").write_text(json.dumps(values))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        r = next((r for key, r in values.get("rank_pattern", {}).items() if name.endswith(key)), values["r"])
        prefix = f"base_model.model.{name}"
        if name.endswith(EMBEDDINGS):
            tensors[f"{prefix}.lora_embedding_A"] = torch.randn(r, inputs, generator=generator) / 4
            tensors[f"{prefix}.lora_embedding_B"] = torch.randn(outputs, r, generator=generator) / 4
            if values.get("use_dora", False):
                tensors[f"{prefix}.lora_magnitude_vector"] = torch.rand(outputs, generator=generator) + 1.0
            continue
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(r, inputs, generator=generator) / sqrt(inputs)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, r, generator=generator) / 16
        vectors = {
            "lora_magnitude_vector": values.get("use_dora", False),
            "lora_B.bias": values.get("lora_bias", False),
            "base_layer.bias": values["bias"] != "none",
        }
        for end in (end for end, is_there in vectors.items() if is_there):
            tensors[f"{prefix}.{end}"] = torch.rand(outputs, generator=generator) + 0.1
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def extend(directory: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Let an adapter have these tensors and options, too."""
    own = {f"base_model.model.{name}": tensor.clone() for name, tensor in tensors.items()}
    weights, options = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    save_file(load_file(weights) | own, weights)
    options.write_text(json.dumps(json.loads(options.read_text()) | config))
    return directory


def merge(
    oracle: torch.nn.Module, directory: Path, scales: Mapping[str, float], default: float = 2.0
) -> None:
    """Add an adapter to a model's weights; `scales` are those of modules, by the ends of their names."""
    tensors = load_file(directory / "adapter_model.safetensors")
    modules: dict[str, Any] = dict(oracle.named_modules())
    for key, a in tensors.items():
        end = next((end for end in (".lora_A.weight", ".lora_embedding_A") if key.endswith(end)), None)
        if end is not None:
            prefix = key.removesuffix(end)
            own = {end.removeprefix(f"{prefix}."): part for end, part in tensors.items() if prefix in end}
            module = modules[prefix.removeprefix("base_model.model.")]
            module.weight = torch.nn.Parameter(module.weight.clone())  # which a tied one would share
            scale = next((value for end, value in scales.items() if prefix.endswith(end)), default)
            with torch.no_grad():
                _merge(module, scale * tensors[key.replace("_A", "_B")] @ a, scale, own)


def _merge(module: Any, product: Tensor, scale: float, own: Mapping[str, Tensor]) -> None:
    """Weight W of the product P becomes W + P, or m (W + P) / |W + P| by rows; biases are replaced and added."""
    weight = (
        module.weight if hasattr(module, "in_features") else module.weight.t()
    )  # of Conv1D and embeddings
    weight += product
    if "lora_magnitude_vector" in own:
        weight *= (own["lora_magnitude_vector"] / weight.norm(dim=1))[:, None]
    if "base_layer.bias" in own:
        module.bias.copy_(own["base_layer.bias"])
    if "lora_B.bias" in own:
        bias = torch.zeros(len(weight)) if module.bias is None else module.bias
        module.bias = torch.nn.Parameter(bias + scale * own["lora_B.bias"])


def merged_oracle(model_dir: Path, adapter: Path, scales: Mapping[str, float] | None = None) -> Any:
    """The model of transformers with an adapter in its weights."""
    oracle = oracle_of(model_dir)
    merge(oracle, adapter, scales or {})
    return oracle
