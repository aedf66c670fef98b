# SPDX-License-Identifier: Apache-2.0
"""Linear layers, norms, embeddings and activations, each against the plain formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.kernels import ops
from quire.kernels.linear import WeightScheme
from quire.kernels.low_rank import LowRankStacks
from quire.layers.activation import GATED, PLAIN
from quire.layers.attention_parts import slopes
from quire.layers.base import Layer
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import GateUpLinear, Linear, QKVLinear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.quantization import method_of
from quire.layers.shard import Shard
from quire.layers.slot import uncovered_reason
from quire.layers.step import StepContext
from quire.models.families.fields import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from tests.fixtures.folded import folded

F32 = torch.float32
STEP = StepContext(())


def fill(layer: Layer, *names: str) -> dict[str, torch.Tensor]:
    """Random checkpoint tensors, already in their slots."""
    tensors = {}
    for name, slot in layer.slots(names):
        tensors[name] = torch.randn(slot.target.shape)
        slot.fill(tensors[name])
    return tensors


def test_qkv_is_three_linears() -> None:
    layer = QKVLinear(hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=3, bias=True, dtype=F32)
    tensors, x = fill(layer, "q", "k", "v"), torch.randn(5, 12)
    for name, heads, num_heads in zip("qkv", layer.heads(x, STEP), (4, 2, 2), strict=True):
        assert heads.shape == (5, num_heads, 3)
        expected = nn.functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        torch.testing.assert_close(heads.flatten(1), expected)


@folded("activation", list(GATED))
@folded("loaded", [False, True])
def test_gate_up_is_two_linears_and_an_activation(activation: str, loaded: bool) -> None:
    layer = GateUpLinear(hidden_size=4, intermediate_size=6, bias=False, dtype=F32, activation=activation)
    tensors, x = fill(layer, "gate", "up"), torch.randn(5, 4)
    if loaded:
        layer.finish_loading()
    expected = torch.cat([x @ tensors[f"{name}.weight"].t() for name in ("gate", "up")], 1)
    torch.testing.assert_close(layer(x, STEP), GATED[activation](expected))


@pytest.mark.parametrize("loaded", [False, True])
def test_activation_follows_the_matmul_and_the_adapters_sum(loaded: bool) -> None:
    ends, plain = (
        Linear(in_features=20, out_features=24, bias=True, dtype=F32, activation=activation)
        for activation in ("gelu", None)
    )
    for layer in (ends, plain):
        torch.manual_seed(3)
        fill(layer, "up")
        if loaded:
            layer.finish_loading()
        layer.adapters = LowRankStacks.empty(2, (24,), 20, 16, F32, torch.device("cpu"))
        layer.adapters.a.normal_()
        layer.adapters.b.normal_()
        layer.adapters.scales.fill_(1.0)
        layer.adapters.ranks.fill_(5)
    x, rows = torch.randn(6, 20), torch.tensor([0, -1, 1, -1, -1, 0], dtype=torch.int32)
    alone, adapted = ends(x, STEP), ends(x, StepContext((), adapter_rows=rows))
    assert torch.equal(alone, ops.activate(plain(x, STEP), "gelu"))
    assert torch.equal(adapted, ops.activate(plain(x, StepContext((), adapter_rows=rows)), "gelu"))
    assert torch.equal(adapted[rows < 0], alone[rows < 0])
    assert not torch.isclose(adapted[rows >= 0], alone[rows >= 0]).all(1).any()


def test_heads_put_together_by_key_value_heads() -> None:
    """As one tensor of GPT-NeoX's kind: queries, key and value of the first key-value head, then those of the next."""
    layer = QKVLinear(
        hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=3, bias=True, dtype=F32, grouped=True
    )
    tensors, slots = (
        {"qkv.weight": torch.randn(24, 12), "qkv.bias": torch.randn(24)},
        list(layer.slots(["qkv"])),
    )
    for name, slot in slots:
        slot.fill(tensors[name][slot.source.box])
    assert (
        uncovered_reason((24, 12), [slot.source.region for name, slot in slots if "weight" in name]) is None
    )
    x = torch.randn(5, 12)
    expected = nn.functional.linear(x, *tensors.values()).view(5, 2, 4, 3)
    for heads, part in zip(layer.heads(x, STEP), (slice(0, 2), slice(2, 3), slice(3, 4)), strict=True):
        torch.testing.assert_close(heads, expected[:, :, part].flatten(1, 2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_with_gates_behind_their_queries(ranks: int) -> None:
    """As in Qwen3-Next's q_proj: a head's query, its gate, then those of the next head."""
    weights = {
        "q.weight": torch.randn(24, 12),
        "k.weight": torch.randn(6, 12),
        "v.weight": torch.randn(6, 12),
    }
    x, shares = torch.randn(5, 12), []
    for rank in range(ranks):
        layer = QKVLinear(
            hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=3, bias=False, dtype=F32, gated=True
        )
        layer.create_weights(layer.method, Shard(rank, ranks))
        slots = list(layer.slots(["q", "k", "v", "q"]))
        for name, slot in slots:
            slot.fill(weights[name][slot.source.box])
        regions = [slot.source.region for name, slot in slots if name == "q.weight"]
        assert uncovered_reason((24, 12), regions) is None
        shares.append(layer.heads(x, STEP))
    q, k, v, gate = (torch.cat(parts, 1) for parts in zip(*shares, strict=True))
    both = (x @ weights["q.weight"].t()).view(5, 4, 2, 3)
    for heads, expected in ((q, both[:, :, 0]), (gate, both[:, :, 1])):
        torch.testing.assert_close(heads, expected)
    for heads, name in ((k, "k.weight"), (v, "v.weight")):
        torch.testing.assert_close(heads.flatten(1), x @ weights[name].t())


def test_clipped_heads() -> None:
    layer = QKVLinear(
        hidden_size=12, num_heads=2, num_kv_heads=2, head_dim=3, bias=False, dtype=F32, clip=0.5
    )
    fill(layer, "q", "k", "v")
    rows = torch.cat([part.flatten(1) for part in layer.heads(torch.randn(5, 12), STEP)], 1)
    assert rows.abs().max() == 0.5


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_head_of_unit_rows(quantization: str | None) -> None:
    layer = VocabEmbedding(vocab_size=7, size=64, dtype=F32, is_head=True, unit_rows=True)
    if quantization:
        layer.create_weights(method_of(WeightScheme(quantization)))
    tensors, x = fill(layer, "head"), torch.randn(5, 64)
    layer.finish_loading()
    expected = x @ nn.functional.normalize(tensors["head.weight"]).t()
    torch.testing.assert_close(layer.logits(x), expected, rtol=0.0, atol=0.2 if quantization else 1e-5)


@pytest.mark.parametrize(("heads", "expected"), [(4, [2, 4, 6, 8]), (6, [2, 4, 6, 8, 1, 3]), (1, [8])])
def test_slopes_of_alibi(heads: int, expected: list[int]) -> None:
    assert slopes(heads).log2().neg().tolist() == expected


def test_layer_norm_without_weight_or_bias() -> None:
    x = torch.randn(3, 8)
    plain = LayerNorm(size=8, eps=1e-5, dtype=F32, has_weight=False, has_bias=False)
    assert list(plain.slots(["norm"])) == []
    torch.testing.assert_close(plain(x), nn.functional.layer_norm(x, (8,)))
    offset = LayerNorm(size=8, eps=1e-5, dtype=F32, has_bias=False, offset=1.0)
    weight = fill(offset, "norm")["norm.weight"]
    torch.testing.assert_close(offset(x), nn.functional.layer_norm(x, (8,), weight + 1.0))


def test_merged_in_the_checkpoint_already() -> None:
    layer = GateUpLinear(hidden_size=4, intermediate_size=6, bias=False, dtype=F32, activation="silu")
    tensors = fill(layer, "gate_up")
    assert tensors["gate_up.weight"].shape == (12, 4)
    assert torch.equal(layer.weight, tensors["gate_up.weight"])


def test_transposed_in_the_checkpoint() -> None:
    layer = Linear(in_features=4, out_features=6, bias=True, dtype=F32, transposed=True)
    tensors, x = fill(layer, "c"), torch.randn(5, 4)
    assert tensors["c.weight"].shape == (4, 6)
    torch.testing.assert_close(layer(x, STEP), x @ tensors["c.weight"] + tensors["c.bias"])


def test_rms_norm_and_its_residual() -> None:
    layer, x, residual = RMSNorm(size=8, eps=1e-5, dtype=F32), torch.randn(3, 8), torch.randn(3, 8)
    fill(layer, "norm")
    expected = nn.functional.rms_norm(x + residual, (8,), layer.weight, 1e-5)
    normed, total = layer.add(x, residual)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(total, x + residual)
    first, same = layer.add(x, None)
    assert same is x
    torch.testing.assert_close(first, layer(x))


def test_rms_norm_offset_is_added_in_float32() -> None:
    layer = RMSNorm(size=8, eps=1e-5, dtype=torch.bfloat16, offset=1.0)
    stored = fill(layer, "norm")["norm.weight"]
    assert layer.weight.dtype == F32
    assert torch.equal(layer.weight, 1.0 + stored)


def test_layer_norm() -> None:
    layer, x = LayerNorm(size=8, eps=1e-5, dtype=F32), torch.randn(3, 8)
    tensors = fill(layer, "ln")
    expected = nn.functional.layer_norm(x, (8,), tensors["ln.weight"], tensors["ln.bias"], 1e-5)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("has_bias", [True, False])
def test_fused_sum_and_norm_has_the_bits_of_separate_ones(has_bias: bool) -> None:
    torch.manual_seed(0)
    norm = LayerNorm(size=37, eps=1e-5, dtype=torch.float32, has_bias=has_bias)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x, residual = torch.randn(5, 37), torch.randn(5, 37)
    normed, total = norm.add(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(total))
    assert torch.equal(norm.add(x, None)[0], norm(x))


def test_embedding_and_head() -> None:
    layer = VocabEmbedding(vocab_size=10, size=4, dtype=F32, scale=3.0)
    weight = fill(layer, "e")["e.weight"]
    assert torch.equal(layer(torch.tensor([3, 9])), weight[[3, 9]] * 3.0)
    hidden = torch.randn(2, 4)
    torch.testing.assert_close(layer.logits(hidden), hidden @ weight.t())


def test_embedding_scale_is_rounded_to_the_dtype() -> None:
    layer = VocabEmbedding(vocab_size=10, size=4, dtype=torch.bfloat16, scale=2304**0.5 + 0.1)
    assert layer.scale == torch.tensor(2304**0.5 + 0.1, dtype=torch.bfloat16).item() != 2304**0.5 + 0.1


def test_logits_are_float32_and_rounded_to_nothing_else() -> None:
    layer = VocabEmbedding(vocab_size=10, size=4, dtype=torch.bfloat16)
    weight, hidden = fill(layer, "e")["e.weight"], torch.randn(2, 4).bfloat16()
    got = layer.logits(hidden)
    assert got.dtype == F32
    torch.testing.assert_close(got, hidden.float() @ weight.bfloat16().float().t())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_logits_of_a_quantized_head_are_rounded_to_nothing_else(kind: str) -> None:
    layer = VocabEmbedding(vocab_size=40, size=64, dtype=torch.bfloat16, is_head=True)
    layer.create_weights(method_of(WeightScheme(kind, 32 if kind == "int4" else 0)))
    fill(layer, "head")
    layer.finish_loading()
    hidden = torch.randn(3, 64).bfloat16()
    got = layer.logits(hidden)
    assert torch.equal(got, layer.logits(hidden.float()))
    assert not torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_activations_are_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.randn(3, 8)
    torch.testing.assert_close(PLAIN[name](x), ACT2FN[name](x))
    if name in GATED:
        gate, up = x.chunk(2, -1)
        torch.testing.assert_close(GATED[name](x), ACT2FN[name](gate) * up)


def test_activation_tables_match_the_config_readers_names() -> None:
    of_families, of_heads = {"clamped_swiglu"}, {"tanh"}
    assert set(GATED) == set(GATED_ACTIVATIONS) | of_families
    assert set(PLAIN) == set(PLAIN_ACTIVATIONS) | of_heads


def test_a_slot_converts_dtypes() -> None:
    layer = Linear(in_features=2, out_features=2, bias=False, dtype=torch.bfloat16)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    (_, slot), *_ = layer.slots(["w"])
    slot.fill(values)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.float(), values)


@pytest.mark.parametrize("kind", ["float", "int8", "int4"])
def test_loading_keeps_one_copy(kind: str) -> None:
    """A packed layer holds its matrix once: no plain weight, and no more bytes than its format takes."""
    layer = Linear(in_features=256, out_features=64, bias=True, dtype=torch.bfloat16)
    layer.create_weights(method_of(WeightScheme(kind)))
    fill(layer, "w")
    layer.finish_loading()
    if layer.packed is None:
        pytest.skip("the C++ kernels were not built")
    assert layer.weight is None
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert layer.packed.nbytes <= {"float": 2.0, "int8": 1.05, "int4": 0.57}[kind] * 256 * 64


def test_a_tied_table_is_looked_up_and_multiplied_from_one_copy() -> None:
    layer = VocabEmbedding(vocab_size=40, size=24, dtype=torch.bfloat16, is_head=True)
    weight = fill(layer, "e")["e.weight"].bfloat16().float()
    layer.finish_loading()
    hidden = torch.randn(3, 24)
    assert torch.equal(layer(torch.tensor([0, 39, 17])), weight[[0, 39, 17]])
    torch.testing.assert_close(layer.logits(hidden), hidden @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.02), ("int4", 0.15)])
def test_a_quantized_table_is_looked_up_as_it_is_multiplied(kind: str, error: float) -> None:
    layer = VocabEmbedding(vocab_size=40, size=24, dtype=torch.bfloat16, is_head=True)
    layer.create_weights(method_of(WeightScheme(kind, fast=False)))
    weight = fill(layer, "e")["e.weight"]
    layer.finish_loading()
    rows, hidden = layer(torch.arange(40)), torch.randn(3, 24)
    assert 0.0 < (rows - weight).norm() < error * weight.norm()
    torch.testing.assert_close(layer.logits(hidden), hidden @ rows.t(), rtol=1e-5, atol=1e-5)
