"""RWKV-7's heads: a program walks through a request's tokens with the state of a head.

B. Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (2025, arXiv:2503.14456).

Invariant: as in `scan`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.triton.launch import next_power_of_2, num_warps
from quire.kernels.triton.states import left_in, of_requests, state_rows

_SLOWEST = tl.constexpr(-0.6065306597126334)
"""Minus e to the power of minus a half: the logarithm of a decay is this, times a number in (0, 1)."""
_LEAST_LENGTH = tl.constexpr(1e-12)


@triton.jit
def _of_token(x, at, row_stride, channel, used):
    return tl.load(x + at * row_stride + channel, mask=used, other=0.0).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_blocks"])
def _rwkv7(
    out, r, w, k, v, a, of_heads, states, starts, lengths, kept_lens, tables, table_width, num_blocks,
    r_row, w_row, k_row, v_row, a_row, state_stride, size, eps, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A head, whose state is [D, D]: by keys, and by values, which are its columns."""
    request, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first, last, before, end, table, source = state_rows(
        starts, lengths, kept_lens, tables, table_width, request, num_blocks, PAGE
    )
    index = tl.arange(0, TILE)
    used, channel = index < size, head * size + index
    both = used[:, None] & used[None, :]
    place = channel[:, None] * size + index[None, :]
    state = tl.load(states + source * state_stride + place, mask=tl.where(source > 0, both, False), other=0.0)
    channels = heads * size
    unit_of = tl.load(of_heads + channel, mask=used, other=0.0)
    rate_of = tl.load(of_heads + channels + channel, mask=used, other=0.0)
    bonus_of = tl.load(of_heads + 2 * channels + channel, mask=used, other=0.0)
    weight = tl.load(of_heads + 3 * channels + channel, mask=used, other=0.0)
    bias = tl.load(of_heads + 4 * channels + channel, mask=used, other=0.0)
    for step in range(last - first):
        at = (first + step).to(tl.int64)
        asked, key = _of_token(r, at, r_row, channel, used), _of_token(k, at, k_row, channel, used)
        value, rate = _of_token(v, at, v_row, channel, used), _sigmoid(_of_token(a, at, a_row, channel, used))
        decay = tl.exp(_sigmoid(_of_token(w, at, w_row, channel, used)) * _SLOWEST)
        unit = key * unit_of
        unit /= tl.maximum(tl.sqrt(tl.sum(unit * unit)), _LEAST_LENGTH)
        key *= 1.0 + (rate - 1.0) * rate_of
        known = tl.sum(unit[:, None] * state, 0)
        state = (
            state * decay[:, None] - (unit * rate)[:, None] * known[None, :] + key[:, None] * value[None, :]
        )
        said = tl.sum(asked[:, None] * state, 0)
        centred = tl.where(used, said - tl.sum(said) / size, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(centred * centred) / size + eps)
        result = centred * scale * weight + bias + tl.sum(asked * key * bonus_of) * value
        tl.store(out + at * channels + channel, result.to(out.dtype.element_ty), mask=used)
        target = left_in(table, before + step + 1, end, num_blocks, PAGE)
        if target > 0:
            tl.store(states + target * state_stride + place, state, mask=both)


def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    of_heads: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    eps: float,
) -> Tensor:
    """See `ops.rwkv7`."""
    _, heads, size, _ = states.shape
    out = torch.zeros(r.shape, dtype=r.dtype, device=r.device)
    if out.numel():
        tile = next_power_of_2(size)
        _rwkv7[(len(metadata.seq_lens), heads)](
            out, r, w, k, v, a, of_heads, states, *of_requests(metadata, states),
            r.stride(0), w.stride(0), k.stride(0), v.stride(0), a.stride(0), states.stride(0), size, eps,
            PAGE=metadata.block_size, TILE=tile, num_warps=num_warps(tile * tile // 2),
        )  # fmt: skip
    return out
