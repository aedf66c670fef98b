"""Rotary embedding and the writing of keys and values to the cache, with every check."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.kernels.cpu.calls import NOTHING, call
from quire.kernels.cpu.checks import (
    Cache,
    Heads,
    check_array,
    check_cache,
    check_heads,
    check_index,
    dtype_code,
    say,
)
from quire.kernels.cpu.library import DTYPE_CODES
from quire.kernels.cpu.norm import check_weight


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    op = "rotary_embedding"
    code = dtype_code(op, "q", q)
    queries, keys = check_heads(op, "q", q, q.dtype), check_heads(op, "k", k, q.dtype)
    num_positions, rot_dim = check_rotary(op, positions, {"q": queries, "k": keys}, cos_sin_cache)
    sizes = (queries.tokens, num_positions, rot_dim, *queries[1:4], *keys[1:4])
    refused = call(op, (q, k, positions, cos_sin_cache), *sizes, int(interleaved), code)
    if refused:
        raise IndexError(f"{op}: {refused} positions are outside the cache of {num_positions} positions")
    return q, k


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> None:
    op = "write_kv"
    code = dtype_code(op, "k", k)
    keys, values = check_heads(op, "k", k, k.dtype), check_heads(op, "v", v, k.dtype)
    cache = _check_write(op, keys, values, k_cache, v_cache, slot_mapping)
    tensors = (k, v, k_cache, v_cache, slot_mapping, _check_scales(op, k_cache, scales))
    strides = (keys.token_stride, keys.head_stride, values.token_stride, values.head_stride)
    sizes = (cache.blocks, cache.block_size, keys.size)
    refused = call(op, tensors, keys.tokens, keys.heads, *strides, *sizes, code, cache.code)
    if refused:
        raise IndexError(
            f"{op}: {refused} slots are outside the cache of {cache.blocks * cache.block_size} slots"
        )


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
    scales: Tensor | None = None,
) -> None:
    op = "rotary_and_write_kv"
    code, dtype = dtype_code(op, "q", q), q.dtype
    queries, keys, values = (
        check_heads(op, "q", q, dtype),
        check_heads(op, "k", k, dtype),
        check_heads(op, "v", v, dtype),
    )
    num_positions, rot_dim = check_rotary(op, positions, {"q": queries, "k": keys}, cos_sin_cache)
    cache = _check_write(op, keys, values, k_cache, v_cache, slot_mapping)
    norm_code = _check_norms(op, q, k, q_norm, k_norm)
    norms = (NOTHING if q_norm is None else q_norm, NOTHING if k_norm is None else k_norm)
    given = _check_scales(op, k_cache, scales)
    tensors = (q, k, v, k_cache, v_cache, positions, cos_sin_cache, slot_mapping, given, *norms)
    layout = (*queries[1:4], *keys[1:4], values.token_stride, values.head_stride)
    sizes = (cache.blocks, cache.block_size, keys.size, int(interleaved), eps, code, cache.code, norm_code)
    refused = call(op, tensors, keys.tokens, num_positions, rot_dim, *layout, *sizes)
    if refused:
        bounds = f"{num_positions} positions and {cache.blocks * cache.block_size} slots"
        raise IndexError(f"{op}: {refused} tokens are outside the {bounds} of the caches")


def check_rotary(op: str, positions: Tensor, rotated: Mapping[str, Heads], cache: Tensor) -> tuple[int, int]:
    """The shape of the table of cosines and sines."""
    tokens = rotated["q"].tokens
    check_index(op, "positions", positions, tokens)
    shape = cache.shape
    if cache.dtype is not torch.float32 or len(shape) != 2 or shape[1] % 2 or not cache.is_contiguous():
        raise ValueError(f"{op}: cos_sin_cache must be float32 [P, even]; it is {say(cache)}")
    num_positions, rot_dim = shape
    for name, heads in rotated.items():
        if heads.tokens != tokens or heads.size < rot_dim:
            found = f"[{heads.tokens}, {heads.heads}, {heads.size}]"
            raise ValueError(f"{op}: {name} must be [{tokens}, heads, >= {rot_dim}]; it is {found}")
    if not cache.is_cpu:
        raise ValueError(f"{op}: cos_sin_cache must be on the CPU, but is on {cache.device}")
    return num_positions, rot_dim


def _check_norms(op: str, q: Tensor, k: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> int:
    """The code of the weights' dtype; if there are none, of q's."""
    if q_norm is None and k_norm is None:
        return DTYPE_CODES[q.dtype]
    if q_norm is None or k_norm is None or q_norm.dtype is not k_norm.dtype or q.shape[2] != k.shape[2]:
        norms = " and ".join("none" if norm is None else say(norm) for norm in (q_norm, k_norm))
        raise ValueError(
            f"{op}: norms of q and k must have one dtype, and their heads one size; they are {norms} "
            f"for {say(q)} and {say(k)}"
        )
    check_weight(op, "q_norm", q, q_norm)
    return check_weight(op, "k_norm", k, k_norm)


def _check_scales(op: str, k_cache: Tensor, scales: Tensor | None) -> Tensor:
    """What the kernel is told of them."""
    if scales is None:
        return NOTHING
    if k_cache.dtype is not torch.int8:
        raise TypeError(f"{op}: scales are for int8 caches; these are {k_cache.dtype}")
    check_array(op, "scales", scales, torch.float32, (2, k_cache.shape[1]))
    return scales


def _check_write(op: str, k: Heads, v: Heads, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Cache:
    if v.tokens != k.tokens or v.heads != k.heads or v.size != k.size:
        shapes = f"[{v.tokens}, {v.heads}, {v.size}] and [{k.tokens}, {k.heads}, {k.size}]"
        raise ValueError(f"{op}: v must be of k's shape; they are {shapes}")
    check_index(op, "slot_mapping", slots, k.tokens)
    return check_cache(op, k_cache, v_cache, k.heads, k.size)
