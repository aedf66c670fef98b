# SPDX-License-Identifier: Apache-2.0
"""Torch oracles of routing, of experts and of low-rank adapters.

Invariant: as in `reference`; a token's experts are added in the order of their numbers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.config.arch import Routing
from quire.kernels.experts import ExpertAdapters, ExpertWeights
from quire.kernels.low_rank import LowRankStacks
from quire.kernels.reference import FUSED_ACTIVATIONS, packed_linear


def low_rank_linear(out: Tensor, x: Tensor, adapter_rows: Tensor, adapters: LowRankStacks, /) -> None:
    """Add the output of each row's low-rank adapter for x to out, in place (E. Hu et al., 2021, arXiv:2106.09685).

    If the adapter is affine, a row is multiplied by its factors, and its offsets are added, before.

    out [T, N] and x [T, K] of one float dtype, out contiguous. adapter_rows [T] int32 has each row's slot; a negative
    number leaves the row unchanged. An invalid slot is an IndexError on a CPU, and leaves the row unchanged on a GPU.
    Computed in float32, and rounded once, when it is added. A row's result depends on that row and its adapter alone.
    """
    slots = sorted({slot for slot in adapter_rows.tolist() if slot >= 0})
    count = len(adapters.a)
    if slots and slots[-1] >= count:
        raise IndexError(f"low_rank_linear: adapter {slots[-1]} is outside the {count} slots")
    for slot in slots:
        rows = (adapter_rows == slot).nonzero()[:, 0]
        for part, columns in enumerate(adapters.columns()):
            rank = int(adapters.ranks[slot, part])
            shrunk = x[rows].float() @ adapters.a[slot, part, :, :rank].float()
            shrunk = shrunk * adapters.scales[slot, part, :rank]
            added = shrunk @ adapters.b[slot, :rank, columns].float()
            base = out[rows, columns].float()
            if adapters.affine[slot, part]:
                base = base * adapters.factors[slot, columns] + adapters.offsets[slot, columns]
            out[rows, columns] = (base + added).to(out.dtype)


_LEAST_SUM = 1e-20
"""Added to the divisor of normalized weights: sigmoid scores may all be 0."""


def route(logits: Tensor, bias: Tensor | None, /, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each token's experts: logits [T, E] any float dtype -> ids int32 [T, top_k] and weights float32 [T,
    top_k].

    Scores are the softmax or the sigmoids of a row. Selection scores are scores plus `bias` (float32 [E]; D. Wang et
    al., 2024, arXiv:2408.15664). With groups, only the `top_groups` groups with the largest sums of their
    `group_members` highest selection scores are eligible (DeepSeek-V2, arXiv:2405.04434). The `top_k` experts with the
    highest selection scores are chosen, in that order, ties by lower id. Weights are their scores, divided by their sum
    (plus 1e-20) if `normalized`, times `scale`. A row's result depends on that row alone.

    With "sparsemixer" (L. Liu et al., 2024, arXiv:2409.12136) logits are chosen one by one, always the largest
    remaining, m. Its weight, before `scale`, is its softmax probability among it and the remaining l with (m - l) /
    max(|l|, m) <= `reach`.
    """
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
    """Choose experts one by one, each weighted against the remaining ones that are nearly as good."""
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
    """Set the scores of all groups but the best to -inf."""
    groups = torch.unflatten(ranks, 1, (routing.groups, -1))
    judged = groups.sort(-1, descending=True).values[..., : routing.group_members].sum(-1)
    best = torch.zeros_like(judged, dtype=torch.bool).scatter(1, _first(judged, routing.top_groups), True)
    return groups.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(1)


def _first(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values, ties by lower index."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    /,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return the weighted sum of each token's expert outputs: x [T, H] -> [T, H] of x's dtype.

    chosen [T, k] int32, different within a row, and weights [T, k] float32 as from `route`; an invalid id is an
    IndexError. An expert is `down(activation(gate(x), up(x)))`, or without a gate `down(activation(up(x)))`, each
    matmul as in `packed_linear`; only chosen experts are read. A token's experts are added in float32 in the order of
    their ids, independent of the rest of the step. Choices outside the numbers of `of`, which other ranks hold, add
    nothing.

    With adapters, and `adapter_rows` [T] int32 with each token's adapter, its outputs are added to each matmul as in
    `low_rank_linear`, to gate and up before the activation.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rows, places, made in _made("experts", x, chosen, of, adapter_rows, adapters):
        out.index_add_(0, rows, weights[rows, places, None] * made)
    return out.to(x.dtype)


def expert_rows(
    x: Tensor,
    chosen: Tensor,
    /,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return the output of each of a token's experts: x [T, H], chosen [T, k] as in `experts` -> float32 [T, k, H].

    Zeros for choices outside the numbers of `of`. Adapters, for the numbers of `of`, as in `experts`.
    """
    out = torch.zeros((*chosen.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for rows, places, made in _made("expert_rows", x, chosen, of, adapter_rows, adapters):
        out[rows, places] = made
    return out


def add_choices(rows: Tensor, chosen: Tensor, weights: Tensor, /) -> Tensor:
    """Return the weighted sum of `expert_rows`' output, float32 [T, k, H] -> [T, H], with the bits of `experts`."""
    order = chosen.argsort(dim=1, stable=True)
    rows, weights = rows.gather(1, order[..., None].expand_as(rows)), weights.gather(1, order)
    out = torch.zeros_like(rows[:, 0])
    for place in range(chosen.shape[1]):
        out += weights[:, place, None] * rows[:, place]
    return out


def _made(
    op: str,
    x: Tensor,
    chosen: Tensor,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for each chosen expert on this rank, in order: tokens, their places in `chosen`, and its output."""
    outside = (chosen < 0) | (chosen >= of.num_in_layer)
    if outside.any():
        raise IndexError(f"{op}: {int(outside.sum())} choices are outside the {of.num_in_layer} experts")
    for expert in torch.unique(chosen).tolist():
        if expert not in of.numbers:
            continue
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        index, inputs = expert - of.first, x[rows].float()
        if adapters is None or adapter_rows is None:
            yield rows, places, _expert(inputs, of, index)
        else:
            yield rows, places, _adapted_expert(inputs, of, index, adapter_rows[rows], adapters)


def _expert(x: Tensor, of: ExpertWeights, index: int) -> Tensor:
    up_bias, down_bias = _biases(of, index)
    inner = packed_linear(x, of.gate_up[index], up_bias, of.activation)
    return packed_linear(inner, of.down[index], down_bias)


def _adapted_expert(
    x: Tensor, of: ExpertWeights, index: int, adapter_rows: Tensor, adapters: ExpertAdapters
) -> Tensor:
    count = len(adapters.down.a) // len(of)
    if (adapter_rows >= count).any():
        raise IndexError(f"experts: a token's adapter is outside the {count} adapters")
    slots = torch.where(adapter_rows < 0, -1, index * count + adapter_rows)
    up_bias, down_bias = _biases(of, index)
    both = packed_linear(x, of.gate_up[index], up_bias)
    low_rank_linear(both, x, slots, adapters.gate_up)
    inner = FUSED_ACTIVATIONS[of.activation](both)
    out = packed_linear(inner, of.down[index], down_bias)
    low_rank_linear(out, inner, slots, adapters.down)
    return out


def _biases(of: ExpertWeights, index: int) -> tuple[Tensor | None, Tensor | None]:
    up, down = (bias[index] if bias else None for bias in (of.gate_up_bias, of.down_bias))
    return up, down
