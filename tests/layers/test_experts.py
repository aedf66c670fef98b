# SPDX-License-Identifier: Apache-2.0
"""Routers and experts as layers: what is rounded, what must be alike, and what graphs can hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.cpu import library
from quire.layers.experts import ExpertRouter, Experts
from quire.layers.kv_cache import why_not_captured
from quire.models.base import CausalLM
from tests.models.harness import load_tiny

needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())


def only(model: CausalLM, kind: type) -> Any:
    return next(module for module in model.modules() if isinstance(module, kind))


@needs_kernels
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_experts_are_rounded_and_their_router_is_not(kind: str, tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model("qwen3moe"), quantization=kind)
    assert only(model, ExpertRouter).packed.scheme.kind == "float"
    of = only(model, Experts)._of()
    assert {matrix.scheme.kind for matrix in (*of.gate_up, *of.down)} == {kind}


@needs_kernels
def test_experts_that_are_not_kept_alike_are_refused(tiny_model: Callable[[str], Path]) -> None:
    config = {"ignore": ["model.layers.0.mlp.experts.3.up_proj"]}
    model = load_tiny(tiny_model("qwen3moe"), quantization="int8", quantization_config=config)
    with pytest.raises(ConfigError, match=r"0\.mlp\.experts: all experts must be quantized in the same way"):
        why_not_captured(model)


@needs_kernels
def test_only_packed_experts_can_be_recorded(tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model("qwen3moe"))
    assert why_not_captured(model) is None
    experts = only(model, Experts)
    experts._weights = None
    for member in experts.children():
        for layer in (member.gate_up_proj, member.down_proj):
            layer.packed, layer.weight = None, torch.nn.Parameter(torch.zeros(layer.num_rows, layer.inputs))
    assert why_not_captured(model) == "experts by reference cannot be captured"
