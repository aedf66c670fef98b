# SPDX-License-Identifier: Apache-2.0
"""Tests of malformed adapters: the error names file, tensor and limit, and nothing of the adapter is used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import StartupError
from quire.lora.checkpoint import read_adapter
from quire.lora.peft_config import CONFIG_NAME, WEIGHTS_NAME
from quire.lora.targets import Targets
from tests.fixtures.folded import folded
from tests.lora.adapters import write_adapter
from tests.models.harness import load_tiny

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"
TABLE = "base_model.model.model.embed_tokens"
SHAPES = {Q: (64, 64), "model.layers.1.mlp.up_proj": (96, 64)}


@pytest.fixture(scope="module")
def targets(tiny_model: Callable[[str], Path]) -> Targets:
    return Targets(load_tiny(tiny_model("llama")))


def refusal(directory: Path, targets: Targets) -> str:
    with pytest.raises(StartupError) as caught:
        read_adapter(directory, targets, 8, torch.float32)
    return str(caught.value).replace(f"{directory}/", "")


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(directory / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, directory / WEIGHTS_NAME)
    return directory


@folded(
    ("config", "problem"),
    [
        ({"peft_type": "IA3"}, 'peft_type = "IA3" is not supported; it must be one of LORA'),
        ({"bias": "some"}, 'bias = "some" is not supported'),
        ({"use_dora": "yes"}, "use_dora must be true or false"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying = true is not supported"),
        ({"trainable_token_indices": [3, 3]}, "trainable_token_indices must be lists of distinct token ids"),
        (
            {"trainable_token_indices": {"embed_tokens": "3"}},
            "trainable_token_indices must be lists of distinct",
        ),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa" is not supported'),
        ({"something_new": {"a": 1}}, 'something_new = {"a": 1} is not supported'),
        ({"r": 0}, "r must be an integer in [1, 4096], got 0"),
        ({"lora_alpha": "much"}, 'lora_alpha must be a number in [0, 1e+12], got "much"'),
        ({"rank_pattern": {"q_proj": "x"}}, 'q_proj must be an integer in [1, 4096], got "x"'),
        ({"rank_pattern": {"(": 4}}, "rank_pattern has '(', which is not a regular expression"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_adapter_config_is_refused(
    config: dict[str, Any], problem: str, targets: Targets, tmp_path: Path
) -> None:
    write_adapter(tmp_path, SHAPES)
    values = json.loads((tmp_path / CONFIG_NAME).read_text()) | config
    (tmp_path / CONFIG_NAME).write_text(json.dumps(values))
    message = refusal(tmp_path, targets)
    assert message.startswith(CONFIG_NAME)
    assert problem in message


@folded(
    ("change", "name", "problem"),
    [
        (lambda all: all.pop(A), B, f"has no partner {A}"),
        (lambda all: all.pop(B), A, f"has no partner {B}"),
        (lambda all: all.update({A: all[A][:, :9].clone()}), A, "has shape [4, 9]; the model's layer implies [4, 64]"),
        (lambda all: all.update({B: all[B][:9].clone()}), B, "has shape [9, 4]; the model's layer implies [64, 4]"),
        (lambda all: all.update({A: all[A][0].clone()}), A, "has shape [64]; the model's layer implies [64, 64]"),
        (lambda all: all.update({A: all[A].to(torch.int8)}), A, "is int8; adapters are floats"),
        (lambda all: all.update({A: all[A][:2].clone(), B: all[B][:, :2].clone()}), A, "has rank 2, adapter_config"),
        (lambda all: all.update({A: torch.ones(9, 64), B: torch.ones(64, 9)}), A, "has rank 9; --max-lora-rank is 8"),
    ],
    ids=["without-a", "without-b", "inputs", "outputs", "dimensions", "integers", "config", "limit"],
)  # fmt: skip
def test_bad_adapter_tensor_is_refused(
    change: Callable[[dict[str, Tensor]], Any], name: str, problem: str, targets: Targets, tmp_path: Path
) -> None:
    message = refusal(rewrite(write_adapter(tmp_path, SHAPES), change), targets)
    assert message.startswith(f"{WEIGHTS_NAME}: tensor {name!r} {problem}")


@folded(
    ("name", "problem"),
    [
        (f"{Q}.lora_magnitude_vector", "is for DoRA, but adapter_config.json does not set use_dora"),
        (f"{Q}.lora_B.bias", "has shape [4, 64]; the model's layer implies [64]"),
        (f"{Q}.base_layer.bias", "is a bias, but the model's layer has none"),
        ("model.norm.bias", "is for model.norm, which adapters cannot change"),
        ("model.embed_tokens.lora_embedding_A", f"has no partner {TABLE}.lora_embedding_B"),
        ("model.embed_tokens.lora_A.weight", "is for model.embed_tokens, which is an embedding"),
        (f"{K}.lora_embedding_A", f"is for {K}, which is not an embedding"),
        ("lm_head.weight", "has shape [4, 64]; the model's layer implies [264, 64]"),
        (f"{Q}.weight", f"is a whole weight, but {Q} is neither embedding nor head"),
        ("model.norm.weight", "is for model.norm, which adapters cannot change"),
        ("lm_head.something", "is neither base_model.model.<module>.lora_A.weight nor another supported name"),
        ("model.layers.7.self_attn.q_proj.lora_A.weight", "q_proj, which adapters cannot change"),
    ],
)  # fmt: skip
def test_adapter_of_an_unsupported_module_is_refused(
    name: str, problem: str, targets: Targets, tmp_path: Path
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"base_model.model.{name}"] = torch.ones(4, 64)
        if name.endswith("lora_A.weight"):
            tensors[f"base_model.model.{name}".replace("lora_A", "lora_B")] = torch.ones(264, 4)

    message = refusal(rewrite(write_adapter(tmp_path, SHAPES), add), targets)
    assert message.startswith(f"{WEIGHTS_NAME}: tensor 'base_model.model.{name}'")
    assert problem in message


def test_bad_adapter_files_are_refused(targets: Targets, tmp_path: Path) -> None:
    assert refusal(tmp_path, targets) == f"{CONFIG_NAME}: no such file"
    write_adapter(tmp_path, SHAPES)
    weights = tmp_path / WEIGHTS_NAME
    os.truncate(weights, weights.stat().st_size - 1)
    assert refusal(tmp_path, targets).startswith(f"{WEIGHTS_NAME}: truncated")
    save_file({}, weights)
    assert refusal(tmp_path, targets) == f"{WEIGHTS_NAME}: no tensors"
    weights.unlink()
    assert refusal(tmp_path, targets) == f"{WEIGHTS_NAME}: no such file"
    (tmp_path / "adapter_model.bin").touch()
    assert refusal(tmp_path, targets).startswith("adapter_model.bin: pickled weights are not supported")
