# SPDX-License-Identifier: Apache-2.0
"""Tests of a checkpoint's activation quantization against the formula of compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.formats import Numbers, format_of
from quire.kernels.linear import Layout, PackedWeight, WeightScheme
from quire.models.json_object import JsonObject
from quire.models.quantized.reader import METHODS
from tests.models.quantized.test_published_encodings import compressed, group


def by_definition(x: Tensor, lowest: float, largest: float, dtype: torch.dtype) -> Tensor:
    """A scale for each token: the whole range of numbers over twice its largest magnitude."""
    scale = x.abs().amax(-1, keepdim=True) / ((largest - lowest) / 2)
    steps = (x / scale).round() if dtype is torch.int8 else x / scale
    return steps.clamp(lowest, largest).to(dtype).float() * scale


def weight(kind: str, layout: Layout, *, fast: bool = True) -> PackedWeight:
    scheme = WeightScheme(kind, fast=fast)
    data = torch.zeros(16, 64).to(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    return format_of(scheme).from_numbers(Numbers(data, torch.ones(16, 1)), scheme, 1, layout)


@pytest.mark.parametrize("outliers", [0, 4])
def test_ours_in_8_bits_are_finer_than_a_scale_per_token(outliers: int) -> None:
    """Already of normal values, where rows are as wide as those of models, and much finer where some stand out."""
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    x[:, :outliers] *= 30
    theirs = by_definition(x, -128, 127, torch.int8)
    ours = reference.quantized_input(weight("int8", "panels"), x)
    assert (ours - x).norm() < (0.3 if outliers else 1.0) * (theirs - x).norm()


def test_e4m3_on_a_gpu_is_that_of_a_scale_per_token() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    theirs = by_definition(x, -448, 448, torch.float8_e4m3fn)
    torch.testing.assert_close(
        reference.quantized_input(weight("fp8", "rows"), x), theirs, rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize(("layout", "fast"), [("rows", False), ("panels", True)])
def test_e4m3_matches_floats_for_weights_only_or_on_a_cpu(layout: Layout, fast: bool) -> None:
    x = torch.randn(8, 64)
    assert torch.equal(reference.quantized_input(weight("fp8", layout, fast=fast), x), x)


@pytest.mark.parametrize(
    ("config", "weight_only"),
    [
        (compressed("float-quantized", group(num_bits=8, type="float", strategy="tensor")), True),
        (
            compressed(
                "float-quantized",
                group(num_bits=8, type="float", strategy="tensor") | {"input_activations": {"num_bits": 8}},
            ),
            False,
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}, True),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig"}},
            },
            False,
        ),
        ({"quant_method": "fp8"}, False),
    ],
)
def test_weight_only_encodings_are_recognized(config: dict[str, Any], weight_only: bool) -> None:
    found = METHODS.resolve(config["quant_method"])(JsonObject("config.json", config))
    encoding = found.encoding_of("model.layers.0.mlp.up_proj")
    assert encoding is not None
    assert encoding.weight_only is weight_only
