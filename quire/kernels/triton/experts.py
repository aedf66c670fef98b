# SPDX-License-Identifier: Apache-2.0
"""Experts: choices are sorted by expert, and each tile of rows is multiplied by its expert's weights; and routing.

Four launches serve any step: choices are sorted; gate and up multiply gathered rows, and are activated; down writes its
rows at the places of the choices; and a token's rows are added. The number of programs depends on the numbers of tokens
and experts, and not on the choices, so that a step can be captured and replayed; surplus programs exit. With adapters,
gate and up are written unactivated, adapters are added to them, and another launch activates them, with
the same bits. Routing uses one program per token.

Invariant: a row is multiplied in a tile of fixed size and a token's experts are added in the order of their ids, so no
bit depends on the batch. Unchosen experts are not read. Scores are ordered as integers, ties by lower id, so that the
chosen experts are always valid and different, whatever the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.config.arch import Routing
from quire.kernels.experts import ExpertAdapters, ExpertWeights, stacked
from quire.kernels.linear import PackedWeight
from quire.kernels.triton.codes import book_of
from quire.kernels.triton.elementwise import activated
from quire.kernels.triton.launch import next_power_of_2, num_warps
from quire.kernels.triton.low_rank import low_rank_linear
from quire.kernels.triton.matmul_tile import BLOCK_M, BLOCK_N, as_multiplied, format_options, matmul_tile
from quire.kernels.triton.primitives import NO_KEY, id_of, order_keys

_LEAST_SUM = tl.constexpr(1e-20)


@triton.jit
def _of_best_groups(
    keys, ranks, group, groups, top_groups, group_members, GROUP_TILE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return the keys [G, M] of the groups, a row each, with the largest sums of their highest scores."""
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
    """Return an expert's softmax probability among the remaining ones that are nearly as good."""
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


SORT_TILE = 1024
COLUMNS = 1024


@triton.jit(do_not_specialize=["choices"])
def _sort(order, starts, chosen, choices, TILE: tl.constexpr):
    """Write the choices of this program's expert, in order, after those of the experts before; and their start.

    The last program has no expert: it writes the end of all. A choice of no expert is in none of them.
    """
    expert = tl.program_id(0)
    before = tl.zeros([TILE], tl.int32)
    for first in range(0, choices, TILE):
        choice = first + tl.arange(0, TILE)
        ids = tl.load(chosen + choice, mask=choice < choices, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
    place = tl.sum(before)
    tl.store(starts + expert, place)
    for first in range(0, choices, TILE):
        choice = first + tl.arange(0, TILE)
        mine = (tl.load(chosen + choice, mask=choice < choices, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine) - 1, choice, mask=mine > 0)
        place += tl.sum(mine)


@triton.jit
def _tile(chosen, order, starts, count, BLOCK_M: tl.constexpr, BY_CHOICE: tl.constexpr):
    """Return this program's expert and the range of sorted choices that it may compute.

    BY_CHOICE: one program per choice, which owns its tile or exits, with few reads. Else each expert has one tile more
    than it may need, and a search finds a tile's expert.
    """
    tile = tl.program_id(0)
    if BY_CHOICE:
        exists = tile < tl.load(starts + count)
        choice = tl.load(order + tile, mask=exists, other=0)
        expert = tl.load(chosen + choice, mask=exists, other=0)
        begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
        is_first = exists & ((tile - begin) % BLOCK_M == 0)
        return expert, tl.where(is_first, tile, end), end
    else:
        low, high = tile * 0, count
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(starts + middle) // BLOCK_M + middle <= tile:
                low = middle
            else:
                high = middle
        begin = tl.load(starts + low)
        return low, begin + (tile - begin // BLOCK_M - low) * BLOCK_M, tl.load(starts + low + 1)


@triton.jit
def _activated(gate, up, KIND: tl.constexpr):
    if KIND == "clamped_swiglu":
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        return up * gate / (1.0 + tl.exp(-1.702 * gate))
    elif KIND == "silu_and_mul":
        return activated(gate, "silu") * up
    else:  # up only
        return activated(gate, KIND)


@triton.jit
def _gate_up(
    out, x, x_scales, row_stride, chosen, order, starts, data, scales, zeros, book, bias, count, top_k, hidden, inner,
    ACTIVATION: tl.constexpr, HALVES: tl.constexpr, HAS_BIAS: tl.constexpr, BY_CHOICE: tl.constexpr,
    OWN: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(chosen, order, starts, count, BLOCK_M, BY_CHOICE)
    if first >= end:
        return
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    token = tl.load(order + place, mask=used, other=0) // top_k
    # Gates and ups, if there are gates, alternate in the columns of a tile.
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_used = column < HALVES * inner
    output = expert.to(tl.int64) * HALVES * inner + column % HALVES * inner + column // HALVES
    sums = matmul_tile(
        x, x_scales, token, row_stride, used, data, scales, zeros, book, output, column_used, HALVES * inner, hidden,
        OWN, PAIRS, WHOLE, KIND, GROUP, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=column_used, other=0.0)[None, :]
    if ACTIVATION == "none":
        choice = tl.load(order + place, mask=used, other=0).to(tl.int64)
        target = (
            out + (choice * HALVES * inner)[:, None] + (column % HALVES * inner + column // HALVES)[None, :]
        )
        tl.store(target, sums, mask=used[:, None] & column_used[None, :])
        return
    if HALVES == 1:
        result = _activated(sums, sums, ACTIVATION).to(out.dtype.element_ty)
    else:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_M, BLOCK_N // 2, 2]))
        result = _activated(gate, up, ACTIVATION).to(out.dtype.element_ty)
    PART: tl.constexpr = BLOCK_N // HALVES
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    target = out + (place.to(tl.int64) * inner)[:, None] + column[None, :]
    tl.store(target, result, mask=used[:, None] & (column < inner)[None, :])


@triton.jit
def _activate(out, raw, inner, ACTIVATION: tl.constexpr, HALVES: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < inner
    gate = tl.load(raw + row * HALVES * inner + column, mask=inside, other=0.0)
    up = tl.load(raw + (row * HALVES + HALVES - 1) * inner + column, mask=inside, other=0.0)
    tl.store(
        out + row * inner + column, _activated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _down(
    out, x, x_scales, chosen, order, starts, data, scales, zeros, book, bias, count, hidden, inner,
    HAS_BIAS: tl.constexpr, BY_CHOICE: tl.constexpr, SORTED: tl.constexpr,
    OWN: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(chosen, order, starts, count, BLOCK_M, BY_CHOICE)
    if first >= end:
        return
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_used = column < hidden
    output = expert.to(tl.int64) * hidden + column
    choice = tl.load(order + place, mask=used, other=0)
    sums = matmul_tile(
        x, x_scales, place if SORTED else choice, inner, used, data, scales, zeros, book, output, column_used,
        hidden, inner, OWN, PAIRS, WHOLE, KIND, GROUP, ZEROS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=column_used, other=0.0)[None, :]
    target = out + (choice.to(tl.int64) * hidden)[:, None] + column[None, :]
    tl.store(target, sums, mask=used[:, None] & column_used[None, :])


@triton.jit
def _add_up(out, made, chosen, weights, count, top_k, hidden, TOP_TILE: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < hidden
    place = tl.arange(0, TOP_TILE)
    ids = tl.load(chosen + token * top_k + place, mask=place < top_k, other=count)
    left = (ids >= 0) & (ids < count)
    total = tl.zeros([TILE], tl.float32)
    for _ in range(tl.sum(left.to(tl.int32))):
        lowest = tl.min(tl.where(left, ids, count))
        choice = token * top_k + tl.sum(tl.where(ids == lowest, place, 0))
        total += tl.load(weights + choice) * tl.load(made + choice * hidden + column, mask=inside, other=0.0)
        left &= ids != lowest
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


class _Matrices(NamedTuple):
    """Weights of one layer of all experts, contiguous in memory."""

    one: PackedWeight
    """First expert's weight."""
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.data, self.scales, self.zeros, book_of(self.one), self.bias


def _matrices(matrices: tuple[PackedWeight, ...], biases: tuple[Tensor, ...]) -> _Matrices:
    parts = ([getattr(matrix, name) for matrix in matrices] for name in ("data", "scales", "zeros"))
    data, scales, zeros = (None if part[0] is None else stacked(part) for part in parts)
    assert data is not None
    return _Matrices(matrices[0], data, scales, zeros, stacked(biases) if biases else None)


def _both(of: ExpertWeights) -> tuple[_Matrices, _Matrices]:
    """Return gate and up, and down, moved into contiguous memory once."""
    if of.native is None:
        both = _matrices(of.gate_up, of.gate_up_bias), _matrices(of.down, of.down_bias)
        object.__setattr__(of, "native", both)
    return of.native


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """See `ops.experts`; an invalid choice adds nothing, and is not checked, to avoid a sync."""
    (tokens, top_k), count, device = chosen.shape, len(of), x.device
    up, down = _both(of)
    hidden, inner = up.one.inputs, down.one.inputs
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=device)
    choices = tokens * top_k
    if not choices:
        return out
    order = torch.empty(choices, dtype=torch.int32, device=device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=device)
    _sort[(count + 1,)](order, starts, chosen, choices, TILE=SORT_TILE)
    most = choices // BLOCK_M + count
    tiles, by_choice = min(most, choices), choices <= most
    slots = None
    if adapter_rows is not None and adapters is not None:
        slots = _slots(chosen, adapter_rows, count, len(adapters.down.a))

    rows, row_scales = as_multiplied(x, up.one)
    between = torch.empty(choices, inner, dtype=x.dtype, device=device)
    raw = (
        between
        if slots is None
        else torch.empty(choices, of.halves * inner, dtype=torch.float32, device=device)
    )
    _gate_up[(tiles, triton.cdiv(of.halves * inner, BLOCK_N))](
        raw, rows, row_scales, rows.stride(0), chosen, order, starts, *up.tensors(), count, top_k, hidden, inner,
        ACTIVATION=of.activation if slots is None else "none", HALVES=of.halves, HAS_BIAS=up.bias is not None,
        BY_CHOICE=by_choice, **format_options(up.one, rows.dtype),
    )  # fmt: skip
    if slots is not None and adapters is not None:
        each = x[:, None].expand(-1, top_k, -1).reshape(choices, hidden)
        low_rank_linear(raw, each, slots, adapters.gate_up)
        _activate[(choices, triton.cdiv(inner, COLUMNS))](
            between, raw, inner, ACTIVATION=of.activation, HALVES=of.halves, TILE=COLUMNS
        )
    rows, row_scales = as_multiplied(between, down.one)
    made = torch.empty(choices, hidden, dtype=torch.float32, device=device)
    _down[(tiles, triton.cdiv(hidden, BLOCK_N))](
        made, rows, row_scales, chosen, order, starts, *down.tensors(), count, hidden, inner,
        HAS_BIAS=down.bias is not None, BY_CHOICE=by_choice, SORTED=slots is None,
        **format_options(down.one, rows.dtype),
    )  # fmt: skip
    if slots is not None and adapters is not None:
        low_rank_linear(made, between, slots, adapters.down)
    _add_up[(tokens, triton.cdiv(hidden, COLUMNS))](
        out, made, chosen, weights, count, top_k, hidden, TOP_TILE=next_power_of_2(top_k), TILE=COLUMNS
    )
    return out


def _slots(chosen: Tensor, adapter_rows: Tensor, count: int, num_slots: int) -> Tensor:
    """Return each choice's adapter slot; negative: none."""
    each = num_slots // count
    adapter, exists = adapter_rows[:, None], (chosen >= 0) & (chosen < count)
    slots = torch.where(exists & (adapter >= 0) & (adapter < each), chosen * each + adapter, -1)
    return slots.flatten()
