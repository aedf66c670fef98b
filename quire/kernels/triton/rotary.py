# SPDX-License-Identifier: Apache-2.0
"""Head norms, rotary embedding and KV cache writes, alone and fused.

J. Su et al., "RoFormer: Enhanced transformer with rotary position embedding" (2021).

Invariant: one program per token and head; the runner has validated positions and slots, and a slot below 0 (a padding
row) is skipped.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.formats import FP8_MAX
from quire.kernels.triton.elementwise import normed
from quire.kernels.triton.launch import next_power_of_2, num_warps


@triton.jit
def _rotated(x, row, position, table, rot_dim, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Rotate the first `rot_dim` elements at `x + row`, in place."""
    pair = tl.arange(0, HALF)
    inside = pair < rot_dim // 2
    first = row + (pair * 2 if INTERLEAVED else pair)
    second = row + (pair * 2 + 1 if INTERLEAVED else pair + rot_dim // 2)
    cos = tl.load(table + position * rot_dim + pair, mask=inside, other=0.0)
    sin = tl.load(table + position * rot_dim + rot_dim // 2 + pair, mask=inside, other=0.0)
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + first, a * cos - b * sin, mask=inside)
    tl.store(x + second, b * cos + a * sin, mask=inside)


@triton.jit
def _stored(value, LIMIT: tl.constexpr):
    """Saturate a value to the cache's largest number LIMIT (0: no limit); NaN stays."""
    if LIMIT > 0.0:
        value = value.to(tl.float32)
        value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    return value


@triton.jit
def _turned(
    x, row, norm, position, table, rot_dim, head_size, eps,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Norm, if NORM, and rotate the head at `x + row`, in place."""
    if NORM:
        dim = tl.arange(0, SIZE)
        inside = dim < head_size
        value = tl.load(x + row + dim, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row + dim, normed(value, norm, dim, inside, head_size, eps), mask=inside)
        # Other threads' stores are read next, rounded as by a separate norm.
        tl.debug_barrier()
    _rotated(x, row, position, table, rot_dim, INTERLEAVED, HALF)


@triton.jit
def _rotary_and_write_kv(
    q, k, v, q_norm, k_norm, positions, table, k_cache, v_cache, slots,
    rot_dim, q_heads, head_size, block_size, eps,
    q_token, q_head, k_token, k_head, v_token, v_head,
    kc_block, kc_head, kc_dim, kc_slot, vc_block, vc_head, vc_dim, vc_slot,
    NORM: tl.constexpr, ROTATE: tl.constexpr, WRITE: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr, SIZE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < q_heads:
        if ROTATE:
            row, position = token * q_token + head * q_head, tl.load(positions + token)
            _turned(q, row, q_norm, position, table, rot_dim, head_size, eps, NORM, INTERLEAVED, HALF, SIZE)
    else:
        head -= q_heads
        row = token * k_token + head * k_head
        if ROTATE:
            position = tl.load(positions + token)
            _turned(k, row, k_norm, position, table, rot_dim, head_size, eps, NORM, INTERLEAVED, HALF, SIZE)
            # See above.
            tl.debug_barrier()
        if WRITE:
            slot = tl.load(slots + token)
            if slot >= 0:
                block, offset = slot // block_size, slot % block_size
                dim = tl.arange(0, SIZE)
                inside = dim < head_size
                key = tl.load(k + row + dim, mask=inside)
                place = block * kc_block + head * kc_head + offset * kc_slot + dim * kc_dim
                tl.store(k_cache + place, _stored(key, LIMIT).to(k_cache.dtype.element_ty), mask=inside)
                value = tl.load(v + token * v_token + head * v_head + dim, mask=inside)
                place = block * vc_block + head * vc_head + offset * vc_slot + dim * vc_dim
                tl.store(v_cache + place, _stored(value, LIMIT).to(v_cache.dtype.element_ty), mask=inside)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See `ops.rotary_embedding`; a position outside the table is not checked on a GPU."""
    if len(positions):
        _launch(q, k, None, positions, cos_sin_cache, None, None, None, interleaved)
    return q, k


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `ops.write_kv`."""
    if len(slot_mapping):
        _launch(None, k, v, None, None, k_cache, v_cache, slot_mapping, False)


def rotary_and_write_kv(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See `ops.rotary_and_write_kv`."""
    if len(positions):
        norms = (q_norm, k_norm, eps)
        _launch(q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, interleaved, norms)


def _launch(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    positions: Tensor | None,
    table: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slots: Tensor | None,
    interleaved: bool,
    norms: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0),
) -> None:
    q_norm, k_norm, eps = norms
    rot_dim = 0 if table is None else table.shape[1]
    q_heads, head_size = 0 if q is None else q.shape[1], k.shape[2]
    size = next_power_of_2(head_size)
    is_fp8 = k_cache is not None and k_cache.dtype.itemsize == 1
    _rotary_and_write_kv[(len(k), q_heads + k.shape[1])](
        q, k, v, q_norm, k_norm, positions, table, k_cache, v_cache, slots,
        rot_dim, q_heads, head_size, 0 if k_cache is None else k_cache.shape[3], eps,
        *_strides(q, 2), *_strides(k, 2), *_strides(v, 2),
        *_strides(k_cache, 4), *_value_strides(v_cache),
        NORM=q_norm is not None, ROTATE=table is not None, WRITE=slots is not None, INTERLEAVED=interleaved,
        HALF=next_power_of_2(max(rot_dim // 2, 1)), SIZE=size,
        LIMIT=FP8_MAX if is_fp8 else 0.0, num_warps=num_warps(size),
    )  # fmt: skip


def _strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()[:count]


def _value_strides(v_cache: Tensor | None) -> tuple[int, ...]:
    """Return (block, head, dim, slot) strides, in the order of the keys' strides."""
    block, head, slot, dim = _strides(v_cache, 4)
    return block, head, dim, slot
