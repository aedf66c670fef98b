# SPDX-License-Identifier: Apache-2.0
"""The oracles of routing and of experts, against their definitions row by row."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from quire.config.arch import Routing
from quire.kernels import reference, reference_experts
from quire.kernels.experts import ExpertWeights
from quire.kernels.linear import FLOAT
from tests.fixtures.folded import folded
from tests.kernels.op_cases import ROUTINGS


def mix_row(logits: list[float], routing: Routing) -> tuple[list[int], list[float]]:
    order = sorted(range(len(logits)), key=lambda expert: -logits[expert])
    weights = []
    for place, best in enumerate(order[: routing.top_k]):
        most = logits[best]
        near = [
            x for x in (logits[i] for i in order[place:]) if (most - x) / max(abs(x), most) <= routing.reach
        ]
        weights.append(routing.scale * math.exp(most) / sum(map(math.exp, near)))
    return order[: routing.top_k], weights


def route_row(logits: list[float], bias: list[float], routing: Routing) -> tuple[list[int], list[float]]:
    if routing.scores == "sparsemixer":
        return mix_row(logits, routing)
    if routing.scores == "softmax":
        total = sum(map(math.exp, logits))
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    ranks = {expert: score + more for expert, (score, more) in enumerate(zip(scores, bias, strict=True))}
    size = len(logits) // routing.groups
    groups = [[*ranks][start : start + size] for start in range(0, len(ranks), size)]

    def judged(group: list[int]) -> float:
        return sum(sorted((ranks[expert] for expert in group), reverse=True)[: routing.group_members])

    kept = sorted(groups, key=judged, reverse=True)[: routing.top_groups]
    eligible = [expert for group in kept for expert in group]
    chosen = sorted(eligible, key=lambda expert: ranks[expert], reverse=True)[: routing.top_k]
    divisor = sum(scores[expert] for expert in chosen) if routing.normalized else 1.0
    return chosen, [scores[expert] / divisor * routing.scale for expert in chosen]


@folded(("routing", "count"), ROUTINGS, ids=str)
@folded("biased", [False, True])
def test_routing_is_its_definition(routing: Routing, count: int, biased: bool) -> None:
    torch.manual_seed(count)
    logits, bias = torch.randn(30, count), torch.rand(count) * biased
    chosen, weights = reference_experts.route(logits, bias if biased else None, routing)
    for row in range(len(logits)):
        ids, expected = route_row(logits[row].tolist(), bias.tolist(), routing)
        assert chosen[row].tolist() == ids
        torch.testing.assert_close(weights[row], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_the_bounded_swiglu_is_its_definition() -> None:
    for gate, up in ((0.5, -0.3), (9.0, 2.0), (-20.0, 1.0), (1.0, 30.0), (1.0, -30.0)):
        g, u = min(gate, 7.0), max(-7.0, min(up, 7.0))
        expected = (u + 1) * g / (1 + math.exp(-1.702 * g))
        assert reference.clamped_swiglu(torch.tensor([gate, up])).item() == pytest.approx(expected, abs=1e-5)


def test_experts_are_the_weighted_sum_of_their_mlps() -> None:
    torch.manual_seed(0)
    x, chosen, weights = torch.randn(9, 20), torch.rand(9, 4).argsort(1)[:, :2].int(), torch.rand(9, 2)
    gate, up, down = torch.randn(4, 12, 20), torch.randn(4, 12, 20), torch.randn(4, 20, 12)
    up_bias, down_bias = torch.randn(4, 24), torch.randn(4, 20)
    of = ExpertWeights(
        tuple(reference.pack_weight(torch.cat(pair), FLOAT, 2) for pair in zip(gate, up, strict=True)),
        tuple(reference.pack_weight(matrix, FLOAT) for matrix in down),
        tuple(up_bias),
        tuple(down_bias),
    )
    out = reference_experts.experts(x, chosen, weights, of)
    for token in range(9):
        expected = torch.zeros(20)
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            a = F.linear(x[token], gate[expert], up_bias[expert, :12])
            b = F.linear(x[token], up[expert], up_bias[expert, 12:])
            expected += weight * F.linear(F.silu(a) * b, down[expert], down_bias[expert])
        torch.testing.assert_close(out[token], expected, rtol=1e-4, atol=1e-4)
