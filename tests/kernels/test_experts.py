# SPDX-License-Identifier: Apache-2.0
"""Experts in C++: every weight format, any number of tokens, with the same bits in any company."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.config.arch import Routing
from quire.kernels import ops
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.experts import ExpertAdapters, ExpertWeights
from quire.kernels.linear import FLOAT, WeightScheme
from tests.fixtures.folded import folded
from tests.kernels.op_cases import ROUTINGS, SCHEMES, expert_adapters, random_experts

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu import experts as binding
from quire.kernels.cpu import linear
from quire.kernels.cpu.arena import Arena
from quire.kernels.cpu.recorded_graph import record

FORMATS = [
    *((FLOAT, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *((scheme, torch.bfloat16) for scheme in SCHEMES[1:]),
]
every_format = folded(("scheme", "dtype"), FORMATS, ids=str)
COUNT, TOP_K, HIDDEN, INNER = 7, 3, 90, 50
TOKENS = (0, 1, 2, 5, 64, 65, 130, 200)


def choices(tokens: int, count: int = COUNT, top_k: int = TOP_K) -> tuple[Tensor, Tensor]:
    """Those of low number more often, so that some see more rows than are computed at a time and others none."""
    random = torch.Generator().manual_seed(tokens)
    ranks = torch.rand(tokens, count, generator=random) - 0.6 * torch.arange(count) / count
    return ranks.argsort(1, descending=True)[:, :top_k].int(), torch.rand(tokens, top_k, generator=random)


def rows(tokens: int, size: int = HIDDEN) -> Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(tokens))


def by_linears(x: Tensor, chosen: Tensor, weights: Tensor, of: ExpertWeights) -> Tensor:
    """Each expert as two linear layers: what the oracle does, but with the kernels' own rounding between the two."""
    out = torch.zeros_like(x)
    for expert in range(len(of)):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        up_bias, down_bias = (bias[expert] if bias else None for bias in (of.gate_up_bias, of.down_bias))
        inner = linear.packed_linear(x[tokens], of.gate_up[expert], up_bias, of.activation)
        made = linear.packed_linear(inner, of.down[expert], down_bias)
        out[tokens] += weights[tokens, places, None] * made
    return out


@every_format
def test_any_number_of_tokens_matches_linears_and_tokens_alone(
    scheme: WeightScheme, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    gated = random_experts(COUNT, HIDDEN, INNER, scheme, dtype, biased=True)
    check_any_number_of_tokens(gated)
    check_any_number_of_tokens(replace(gated, gate_up_bias=(), down_bias=()))
    check_any_number_of_tokens(replace(gated, activation="clamped_swiglu"))
    ungated = random_experts(COUNT, HIDDEN, INNER, scheme, dtype, biased=True, activation="relu2")
    check_any_number_of_tokens(ungated)


def check_any_number_of_tokens(of: ExpertWeights) -> None:
    x, (chosen, weights) = rows(max(TOKENS)), choices(max(TOKENS))
    each = zip(x.split(1), chosen.split(1), weights.split(1), strict=True)
    alone = torch.cat([binding.experts(*token, of) for token in each])
    torch.testing.assert_close(alone, by_linears(x, chosen, weights, of), rtol=1e-5, atol=1e-6)
    for tokens in TOKENS:
        assert torch.equal(binding.experts(x[:tokens], chosen[:tokens], weights[:tokens], of), alone[:tokens])
    order = torch.randperm(len(x))
    assert torch.equal(binding.experts(x[order], chosen[order], weights[order], of), alone[order])


@every_format
def test_adapters_add_only_to_matmuls_of_their_rows(scheme: WeightScheme, dtype: torch.dtype) -> None:
    """Rows in any company, and those without an adapter as if there were none."""
    torch.manual_seed(0)
    of = random_experts(COUNT, HIDDEN, INNER, scheme, dtype, biased=True)
    check_adapters(of, scheme)
    check_adapters(replace(of, activation="clamped_swiglu"), scheme)


def check_adapters(of: ExpertWeights, scheme: WeightScheme) -> None:
    adapters, most = expert_adapters(3, of), 130
    x, (chosen, weights), own = rows(most), choices(most), torch.randint(-1, 3, (most,), dtype=torch.int32)
    together = binding.experts(x, chosen, weights, of, own, adapters)
    assert together.isfinite().all()
    plain = binding.experts(x, chosen, weights, of)
    assert torch.equal((together == plain).all(1), own < 0)
    assert torch.equal(binding.experts(x, chosen, weights, of, torch.full_like(own, -1), adapters), plain)
    order = torch.randperm(most)
    for some in (order, *order.split(50), order[:1], order[1:2], order[2:3]):
        got = binding.experts(x[some], chosen[some], weights[some], of, own[some], adapters)
        assert torch.equal(got, together[some])
    if not scheme.fast:
        want = ops.experts.oracle(x, chosen, weights, of, own, adapters)
        torch.testing.assert_close(together, want, rtol=1e-4, atol=1e-4)


def test_invalid_expert_adapters_are_refused() -> None:
    of = random_experts(COUNT, HIDDEN, INNER, FLOAT, torch.float32)
    adapters, (chosen, weights) = expert_adapters(2, of), choices(2)
    with pytest.raises(
        IndexError, match="experts: 3 choices are outside the 7 experts, and the adapters, 2,"
    ):
        binding.experts(rows(2), chosen, weights, of, torch.tensor([2, 1], dtype=torch.int32), adapters)
    with pytest.raises(ValueError, match=r"adapter_rows must be contiguous int32 \[2\]"):
        binding.experts(rows(2), chosen, weights, of, torch.tensor([0]), adapters)
    other = expert_adapters(2, random_experts(COUNT, HIDDEN, INNER + 1, FLOAT, torch.float32))
    with pytest.raises(ValueError, match="are not of 7 experts with 50 features of 90"):
        binding.experts(rows(2), chosen, weights, of, torch.tensor([0, 1], dtype=torch.int32), other)


def members(of: ExpertWeights, first: int, end: int) -> ExpertWeights:
    """Those that a rank has."""
    parts = {name: getattr(of, name)[first:end] for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
    return replace(of, **parts, first=first, total=len(of))


@every_format
def test_sum_of_expert_ranks_has_the_same_bits(scheme: WeightScheme, dtype: torch.dtype) -> None:
    """Rows of choices, of which each is made by one rank and zeros by the others."""
    of = random_experts(COUNT, HIDDEN, INNER, scheme, dtype, biased=True)
    ranks = [members(of, 0, 1), members(of, 1, 5), members(of, 5, COUNT)]
    for tokens in (0, 1, 5, 130):
        x, (chosen, weights) = rows(tokens), choices(tokens)
        made = torch.stack([binding.expert_rows(x, chosen, rank) for rank in ranks])
        assert not ((made != 0).any(-1).sum(0) > 1).any()
        total = binding.add_choices(made.sum(0), chosen, weights)
        assert torch.equal(total, binding.experts(x, chosen, weights, of))


def test_sum_of_expert_adapter_ranks_has_the_same_bits() -> None:
    of, ends = random_experts(COUNT, HIDDEN, INNER, FLOAT, torch.float32, biased=True), [0, 1, 5, COUNT]
    adapters = expert_adapters(2, of)
    for tokens in (1, 5, 130):
        x, (chosen, weights) = rows(tokens), choices(tokens)
        adapter_rows = torch.randint(-1, 2, (tokens,), dtype=torch.int32)
        made = []
        for first, end in pairwise(ends):
            own = slice(2 * first, 2 * end)
            here = ExpertAdapters(adapters.gate_up.part(own), adapters.down.part(own))
            made.append(binding.expert_rows(x, chosen, members(of, first, end), adapter_rows, here))
        total = binding.add_choices(torch.stack(made).sum(0), chosen, weights)
        assert torch.equal(total, binding.experts(x, chosen, weights, of, adapter_rows, adapters))


@pytest.mark.more
@every_format
def test_threads_do_not_change_a_bit(scheme: WeightScheme, dtype: torch.dtype, restore_threads: None) -> None:
    of = random_experts(16, 320, 256, scheme, dtype)
    for tokens in (1, 4, 90):
        x, (chosen, weights) = rows(tokens, 320), choices(tokens, 16, 4)
        results = []
        for threads in (1, 2, 3):
            set_num_threads(threads)
            results.append(binding.experts(x, chosen, weights, of))
        assert all(torch.equal(result, results[0]) for result in results), tokens


def test_the_order_of_a_token_s_choices_does_not_matter() -> None:
    of = random_experts(COUNT, HIDDEN, INNER, FLOAT, torch.float32)
    x, (chosen, weights) = rows(20), choices(20)
    turned = binding.experts(x, chosen.flip(1).contiguous(), weights.flip(1).contiguous(), of)
    assert torch.equal(turned, binding.experts(x, chosen, weights, of))


def test_unselected_expert_is_not_read() -> None:
    of = random_experts(COUNT, HIDDEN, INNER, FLOAT, torch.float32)
    of.down[3].data.fill_(torch.nan)
    x, (chosen, weights) = rows(20), choices(20)
    chosen[chosen == 3] = 6
    assert binding.experts(x, chosen, weights, of).isfinite().all()


@folded(("routing", "count"), ROUTINGS, ids=str)
def test_a_row_is_routed_by_itself(routing: Routing, count: int) -> None:
    logits = rows(33, count)
    together = binding.route(logits, None, routing)
    for row in range(len(logits)):
        alone = binding.route(logits[row : row + 1], None, routing)
        assert all(
            torch.equal(one, all_[row : row + 1]) for one, all_ in zip(alone, together, strict=True)
        ), row


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_route_picks_the_first_of_equal_scores(scores: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    for function in (ops.route.oracle, binding.route):
        chosen, _ = function(logits, None, Routing(5, scores))
        assert chosen.tolist() == [[1, 2, 4, 0, 3]]


def test_logits_that_are_not_finite_still_choose_experts() -> None:
    logits = torch.full((3, 10), torch.nan)
    logits[1, 4:] = 0.0
    logits[2, 3] = torch.inf
    chosen, _ = binding.route(logits, None, Routing(4))
    assert all(len({*row}) == 4 and min(row) >= 0 and max(row) < 10 for row in chosen.tolist())


def test_recorded_graph_routes_its_current_inputs() -> None:
    of = random_experts(COUNT, HIDDEN, INNER, FLOAT, torch.float32)
    gate, place = torch.randn(HIDDEN, COUNT), torch.empty(4, HIDDEN)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        return ops.experts(x, *ops.route(logits, None, Routing(TOP_K)), of)

    logits = torch.empty(4, COUNT)
    graph = record(lambda: layer(place, logits), Arena(1 << 20))
    for _ in range(3):
        place.normal_()
        logits.copy_(place @ gate)
        assert graph.replay()
        assert torch.equal(graph.result, layer(place, logits))


def test_a_choice_of_no_expert_is_refused() -> None:
    of = random_experts(COUNT, HIDDEN, INNER, FLOAT, torch.float32)
    x, (chosen, weights) = rows(4), choices(4)
    chosen[1, 0], chosen[2, 2] = -1, COUNT
    for function in (ops.experts.oracle, binding.experts):
        with pytest.raises(IndexError, match="experts: 2 choices are outside the 7 experts"):
            function(x, chosen, weights, of)


def test_wrong_arguments_are_clear_errors() -> None:
    of = random_experts(COUNT, HIDDEN, INNER, FLOAT, torch.float32)
    x, (chosen, weights) = rows(4), choices(4)
    with pytest.raises(ValueError, match=r"x must be \[T, 90\]; it is float32 \[4, 89\]"):
        binding.experts(x[:, 1:], chosen, weights, of)
    with pytest.raises(ValueError, match=r"chosen must be contiguous int32 \[4, 3\]"):
        binding.experts(x, chosen.long(), weights, of)
    with pytest.raises(ValueError, match=r"weights must be contiguous float32 \[4, 3\]"):
        binding.experts(x, chosen, weights[:, :2], of)
    with pytest.raises(ValueError, match=r"experts: gate_up \[90, 50\] in 1 halves, down"):
        binding.experts(x, chosen, weights, ExpertWeights(of.down, of.down))
    with pytest.raises(ValueError, match="down must be 7 matrices of one shape and format"):
        binding.experts(x, chosen, weights, replace(of, down=of.down[1:]))
    with pytest.raises(ValueError, match="cannot be chosen from by"):
        binding.route(rows(1, 8), None, Routing(5, groups=4, top_groups=2))
