# SPDX-License-Identifier: Apache-2.0
"""Values that int4 on load keeps in int8, packed apart from queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.linear import WeightScheme
from quire.layers.linear import QKVLinear
from quire.layers.quantization import Int4FinerValues
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from tests.models.harness import load_tiny, logits_of

INT4 = WeightScheme("int4", 32, symmetric=False, two_level=True)
INT8 = WeightScheme("int8", 32)
STEP = StepContext(())


def layer_of(*, fast: bool = True, **options: Any) -> tuple[QKVLinear, Tensor]:
    """Return a layer of 4 query and 2 key-value heads with finer values, and the weight that it was made of."""
    layer = QKVLinear(
        hidden_size=96, num_heads=4, num_kv_heads=2, head_dim=16, bias=True, dtype=torch.float32, **options
    )
    schemes = (
        WeightScheme("int4", 32, symmetric=False, two_level=True, fast=fast),
        WeightScheme("int8", 32, fast=fast),
    )
    layer.create_weights(Int4FinerValues(*schemes))
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(layer.num_rows, 96, generator=generator) / 10
    assert layer.weight is not None
    assert layer.bias is not None
    layer.weight.data.copy_(weight)
    layer.bias.data.copy_(torch.randn(layer.num_rows, generator=generator))
    layer.finish_loading()
    return layer, weight


def qkv_layers(model: CausalLM) -> list[QKVLinear]:
    return [layer for _, layer in model.checkpoint_layers() if isinstance(layer, QKVLinear)]


def test_values_packed_apart_are_those_of_int8() -> None:
    layer, weight = layer_of()
    found = layer.unpacked()
    for rows, scheme in ((slice(0, 96), INT4), (slice(96, 128), INT8)):
        assert torch.equal(found[rows], reference.unpack_weight(reference.pack_weight(weight[rows], scheme)))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_heads_of_values_packed_apart_equal_the_whole(clip: float | None) -> None:
    layer, _ = layer_of(clip=clip)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    q, k, v = layer.heads(x, STEP)
    assert (q.shape, k.shape, v.shape) == ((3, 4, 16), (3, 2, 16), (3, 2, 16))
    whole = layer(x, STEP)
    expected = whole if clip is None else whole.clamp(-clip, clip)
    assert torch.equal(torch.cat((q, k, v), 1).flatten(1), expected)


def test_products_of_values_packed_apart_match_the_weight() -> None:
    layer, _ = layer_of(fast=False)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    assert layer.bias is not None
    expected = torch.nn.functional.linear(x, layer.unpacked(), layer.bias.float())
    torch.testing.assert_close(layer(x, STEP), expected, rtol=1e-4, atol=1e-4)


def test_restored_layer_multiplies_as_the_one_it_was_made_of() -> None:
    layer, _ = layer_of()
    other = QKVLinear(
        hidden_size=96, num_heads=4, num_kv_heads=2, head_dim=16, bias=True, dtype=torch.float32
    )
    other.create_weights(layer.method)
    other.restore(layer.tensors())
    x = torch.randn(2, 96)
    assert torch.equal(other(x, STEP), layer(x, STEP))


def test_weights_without_kernels_are_rounded_as_packed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = layer_of()
    monkeypatch.setattr(Int4FinerValues, "replaced", lambda *_: ())
    rounded, _ = layer_of()
    assert rounded.packed is None
    assert rounded.weight is not None
    assert torch.equal(rounded.weight, packed.unpacked())


@pytest.mark.parametrize("option", ["gated", "merged"])
def test_values_stay_with_their_stored_layout(option: str) -> None:
    """Gates of queries stand behind values in memory; outputs that are read as one tensor come from one matrix."""
    layer = QKVLinear(
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        bias=False,
        dtype=torch.float32,
        gated=option == "gated",
        merged=option == "merged",
    )
    assert layer.num_value_rows == 0


@pytest.fixture
def bits(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the bits per weight that a model may have."""
    return lambda most: monkeypatch.setattr("quire.models.methods._MOST_BITS", most)


@pytest.mark.parametrize(("quantization", "apart"), [("int4", True), ("int4-plain", False), ("int8", False)])
def test_int4_alone_packs_values_apart(
    quantization: str, apart: bool, bits: Callable[[float], None], tiny_model: Callable[[str], Path]
) -> None:
    bits(9.0)
    layers = qkv_layers(load_tiny(tiny_model("llama"), quantization=quantization))
    assert all((layer.packed_values is not None) == apart for layer in layers)


def test_adapters_leave_values_in_four_bits(
    bits: Callable[[float], None], tiny_model: Callable[[str], Path]
) -> None:
    bits(9.0)
    model = load_tiny(tiny_model("llama"), quantization="int4", enable_lora=True)
    assert all(layer.packed_values is None for layer in qkv_layers(model))


def test_values_of_last_layers_are_finer_where_room_is_short(
    bits: Callable[[float], None], tiny_model: Callable[[str], Path]
) -> None:
    apart = []
    for most in (0.0, 5.2, 9.0):
        bits(most)
        layers = qkv_layers(load_tiny(tiny_model("llama"), quantization="int4"))
        apart.append([layer.packed_values is not None for layer in layers])
    assert not any(apart[0])
    assert apart[1] == sorted(apart[1])
    assert all(apart[2])


def test_int4_with_finer_values_errs_less(
    bits: Callable[[float], None], tiny_model: Callable[[str], Path]
) -> None:
    sequences = [[1, 5, 9, 3, 7, 2, 8], [4, 4, 6]]

    def logits(**options: Any) -> Tensor:
        return torch.cat(logits_of(load_tiny(tiny_model("llama"), **options), sequences, chunk_sizes=[4]))

    truth, found = logits(), []
    for most in (9.0, 0.0):
        bits(most)
        found.append(logits(quantization="int4"))
    assert (found[0] - truth).norm() < (found[1] - truth).norm()
