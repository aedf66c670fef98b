"""The torch oracles of routing and of experts.

Invariant: as in `reference`; a token's experts are added up in the order of their numbers.
"""

import torch
from torch import Tensor

from quire.config.arch import Routing
from quire.kernels.experts import ExpertAdapters, ExpertWeights
from quire.kernels.reference import GATED, packed_linear
from quire.kernels.reference_lora import lora_linear

_LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by: scores of sigmoids may all be 0."""


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    if routing.scores == "sparsemixer":
        return _mixed(wide, routing)
    scores = wide.softmax(-1) if routing.scores == "softmax" else wide.sigmoid()
    ranks = scores if bias is None else scores + bias
    if routing.groups > routing.top_groups:
        ranks = _of_best_groups(ranks, routing)
    chosen = _first(ranks, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(1, keepdim=True) + _LEAST_SUM)
    return chosen.int(), weights * routing.scale


def _mixed(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """One expert after the other, each weighted against those left that are nearly as good."""
    left, chosen, weights = logits, [], []
    for _ in range(routing.top_k):
        best = _first(left, 1)
        most = left.gather(1, best)
        far = (most - logits) / torch.maximum(logits.abs(), most) > routing.reach
        chosen.append(best)
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(chosen, 1).int(), torch.cat(weights, 1) * routing.scale


def _of_best_groups(ranks: Tensor, routing: Routing) -> Tensor:
    """-inf in all groups but the best."""
    groups = torch.unflatten(ranks, 1, (routing.groups, -1))
    judged = groups.sort(-1, descending=True).values[..., : routing.group_members].sum(-1)
    best = torch.zeros_like(judged, dtype=torch.bool).scatter(1, _first(judged, routing.top_groups), True)
    return groups.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(1)


def _first(values: Tensor, count: int) -> Tensor:
    """Places of the largest, the first one of equals first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    outside = (chosen < 0) | (chosen >= len(of))
    if outside.any():
        raise IndexError(f"experts: {int(outside.sum())} choices are outside the {len(of)} experts")
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(chosen).tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        if adapters is None or adapter_rows is None:
            made = _expert(x[rows].float(), of, expert)
        else:
            made = _adapted_expert(x[rows].float(), of, expert, adapter_rows[rows], adapters)
        out.index_add_(0, rows, weights[rows, places, None] * made)
    return out.to(x.dtype)


def _expert(x: Tensor, of: ExpertWeights, expert: int) -> Tensor:
    up_bias, down_bias = _biases(of, expert)
    inner = packed_linear(x, of.gate_up[expert], up_bias, of.activation)
    return packed_linear(inner, of.down[expert], down_bias)


def _adapted_expert(
    x: Tensor, of: ExpertWeights, expert: int, adapter_rows: Tensor, adapters: ExpertAdapters
) -> Tensor:
    count = len(adapters.down.a) // len(of)
    if (adapter_rows >= count).any():
        raise IndexError(f"experts: a token's adapter is outside the {count} adapters")
    slots = torch.where(adapter_rows < 0, -1, expert * count + adapter_rows)
    up_bias, down_bias = _biases(of, expert)
    both = packed_linear(x, of.gate_up[expert], up_bias)
    lora_linear(both, x, slots, adapters.gate_up)
    inner = GATED[of.activation](both)
    out = packed_linear(inner, of.down[expert], down_bias)
    lora_linear(out, inner, slots, adapters.down)
    return out


def _biases(of: ExpertWeights, expert: int) -> tuple[Tensor | None, Tensor | None]:
    up, down = (bias[expert] if bias else None for bias in (of.gate_up_bias, of.down_bias))
    return up, down
