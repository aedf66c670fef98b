"""The choice of a token's experts, one program per token.

Invariant: scores are ordered as integers, of equal ones the lower id first, so that what is chosen are always different
experts that there are, whatever the logits; and a row's result comes from that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.config.arch import Routing
from quire.kernels.triton.launch import next_power_of_2, num_warps
from quire.kernels.triton.token_order import NO_KEY, id_of, order_keys

_LEAST_SUM = tl.constexpr(1e-20)


@triton.jit
def _of_best_groups(
    keys, ranks, group, groups, top_groups, group_members, GROUP_TILE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The keys [G, M] of the groups, a row each, that are first by the sum of their highest ranks."""
    left, judged = keys, tl.zeros([GROUP_TILE, 1], tl.float32)
    for _ in range(group_members):
        best = left == tl.max(left, 1, keep_dims=True)
        judged += tl.sum(tl.where(best, ranks, 0.0), 1, keep_dims=True)
        left = tl.where(best, NO_KEY, left)
    group_keys = order_keys(judged, group, groups)
    kept = group < 0
    for _ in range(top_groups):
        best = group_keys == tl.max(group_keys)
        kept |= best
        group_keys = tl.where(best, NO_KEY, group_keys)
    return tl.where(kept, keys, NO_KEY)


@triton.jit
def _mixed_weight(logit, most, is_left, reach):
    """An expert's share of a softmax over those left that are nearly as good as it."""
    far = (most - logit) / tl.maximum(tl.abs(logit), most) > reach
    return 1.0 / tl.sum(tl.where(is_left & ~far, tl.exp(logit - most), 0.0))


@triton.jit
def _route(
    ids, weights, logits, bias, row_stride, count, groups, members, top_k, top_groups, group_members, scale, reach,
    SCORES: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALIZED: tl.constexpr, OF_GROUPS: tl.constexpr,
    GROUP_TILE: tl.constexpr, TILE: tl.constexpr, TOP_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUP_TILE)[:, None], tl.arange(0, TILE)[None, :]
    expert = group * members + member
    inside = (group < groups) & (member < members)
    logit = tl.load(logits + row * row_stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORES == "softmax":
        mass = tl.where(inside, tl.exp(logit - tl.max(logit)), 0.0)
        scores = mass / tl.sum(mass)
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        scores = logit
    ranks = scores
    if HAS_BIAS:
        ranks += tl.load(bias + expert, mask=inside, other=0.0)
    keys = tl.where(inside, order_keys(ranks, expert, count), NO_KEY)
    if OF_GROUPS:
        keys = _of_best_groups(keys, ranks, group, groups, top_groups, group_members, GROUP_TILE, TILE)
    place = tl.arange(0, TOP_TILE)
    chosen, weight = tl.zeros([TOP_TILE], tl.int32), tl.zeros([TOP_TILE], tl.float32)
    for turn in range(top_k):
        key = tl.max(keys)
        best = keys == key
        score = tl.sum(tl.where(best, scores, 0.0))
        if SCORES == "sparsemixer":
            score = _mixed_weight(logit, score, keys != NO_KEY, reach)
        chosen = tl.where(place == turn, id_of(key, count).to(tl.int32), chosen)
        weight = tl.where(place == turn, score, weight)
        keys = tl.where(best, NO_KEY, keys)
    if NORMALIZED:
        weight /= tl.sum(weight) + _LEAST_SUM
    tl.store(ids + row * top_k + place, chosen, mask=place < top_k)
    tl.store(weights + row * top_k + place, weight * scale, mask=place < top_k)


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """See `ops.route`."""
    rows, count = logits.shape
    ids = torch.empty(rows, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=logits.device)
    if rows:
        members = count // routing.groups
        group_tile, tile = next_power_of_2(routing.groups), next_power_of_2(members)
        _route[(rows,)](
            ids, weights, logits, bias, logits.stride(0), count, routing.groups, members, routing.top_k,
            routing.top_groups, routing.group_members, routing.scale, routing.reach,
            SCORES=routing.scores, HAS_BIAS=bias is not None,
            NORMALIZED=routing.normalized and routing.scores != "sparsemixer",
            OF_GROUPS=routing.groups > routing.top_groups and routing.scores != "sparsemixer",
            GROUP_TILE=group_tile, TILE=tile, TOP_TILE=next_power_of_2(routing.top_k),
            num_warps=num_warps(group_tile * tile),
        )  # fmt: skip
    return ids, weights
