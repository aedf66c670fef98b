# SPDX-License-Identifier: Apache-2.0
"""Plain-torch oracle of every op: obviously right, and used if no faster implementation applies.

Invariant: arithmetic is float32 whatever the input dtype, rounded once at the end. In latent attention (MLA;
DeepSeek-V2, 2024, arXiv:2405.04434) a latent is the key of all heads and, without its last dimensions, their value.
`accumulate` relies on torch's `segment_reduce` processing each column of a segment from its first row to its last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.distributed.group import Group
from quire.kernels.attention_metadata import (
    AttentionMetadata,
    GroupMetadata,
    check_bidirectional,
    check_features,
    check_last_seen,
)
from quire.kernels.experts import SUM_DTYPE, TokenReduction
from quire.kernels.formats import FP8_MAX, format_of, whole_chunks
from quire.kernels.linear import (
    CHUNK,
    SPAN,
    Function,
    FusedActivation,
    PackedWeight,
    QuantizedRows,
    RowQuantization,
    WeightScheme,
)
from quire.kernels.low_rank import LowRankStacks


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: GroupMetadata,
    scale: float,
    *,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    check_bidirectional(q, window, alibi_slopes, relative_bias)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // k.shape[1]
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for request, length in enumerate(lengths):
        start, end = starts[request], starts[request + 1]
        _check_whole(request, end - start, length, relative_bias)
        queries, keys, values = (x[start:end].float().transpose(0, 1) for x in (q, k, v))
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        scores = queries @ keys.transpose(1, 2) * scale
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.float()[:, None, None] * distance.abs()
        if relative_bias is not None:
            scores = scores + relative_bias[:, relative_bias.shape[1] // 2 - distance]
        if window is not None:
            scores = scores.masked_fill(distance.abs() >= window, -torch.inf)
        out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out


def biases_of(relative_bias: Tensor, distance: Tensor) -> Tensor:
    """Return the biases of `distance` [..., query_len, seq_len] in the shape [..., Hq, query_len, seq_len].

    Raises:
        IndexError: there are biases for fewer than seq_len tokens.
    """
    most, seq_len = relative_bias.shape[1] // 2 + 1, distance.shape[-1]
    if seq_len > most:
        raise IndexError(f"paged_attention: a request has {seq_len} tokens, and there are biases for {most}")
    # Requests of a decode batch are padded to the longest one; what lies past a request's end is hidden.
    places = (most - 1 - distance).clamp(0, relative_bias.shape[1] - 1)
    return relative_bias[:, places].movedim(0, -3)


def _check_whole(request: int, rows: int, length: int, relative_bias: Tensor | None) -> None:
    if rows != length:
        raise IndexError(f"bidirectional_attention: request {request} has {rows} rows of {length} tokens")
    most = length if relative_bias is None else relative_bias.shape[1] // 2 + 1
    if length > most:
        raise IndexError(
            f"bidirectional_attention: request {request} has {length} tokens, and there are biases for {most}"
        )


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add neighbours, then the sums of neighbours, and so on; an odd one out moves up to the next level.

    So the tree over 2n parts contains that over each half, if n is a power of two.
    """
    level = list(parts)
    while len(level) > 1:
        sums = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = sums + level[2 * len(sums) :]
    return level[0]


def all_reduce(x: Tensor, group: Group) -> Tensor:
    return tree_sum(group.all_gather(x))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    return torch.cat(group.all_gather(x), dim)


def all_to_all(x: Tensor, counts: Sequence[int], group: Group) -> tuple[Tensor, list[int]]:
    parts = group.all_to_all(torch.split(x, list(counts)))
    return torch.cat(parts), [len(part) for part in parts]


def low_rank_linear(out: Tensor, x: Tensor, adapter_rows: Tensor, adapters: LowRankStacks) -> None:
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


_COLUMNS = 128
"""Columns reduced at once, so that those of all tokens stay in the processor's cache."""


def accumulate(vectors: Tensor, x: Tensor, chunks: Tensor, reduction: TokenReduction) -> None:
    rows, firsts, starts, counts = chunks
    if not len(rows):
        return
    empty = float("-inf") if reduction == "max" else 0.0
    vectors[rows[starts == 0]] = empty
    places, positions = _tokens(firsts, starts, counts)
    order = _with_what_was(places, counts)
    for begin in range(0, x.shape[1], _COLUMNS):
        columns = slice(begin, begin + _COLUMNS)
        tokens = x[places, columns].to(SUM_DTYPE[reduction])
        if reduction == "weighted":
            tokens = tokens * (positions + 1)[:, None]
        found = torch.cat((vectors[rows, columns], tokens)).index_select(0, order)
        vectors[rows, columns] = torch.segment_reduce(
            found, "max" if reduction == "max" else "sum", lengths=counts + 1, axis=0, unsafe=True
        )


def _tokens(firsts: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index in the step and the position in the text of each token of the chunks, in order."""
    ends = counts.cumsum(0)
    offsets = torch.arange(int(ends[-1]), device=counts.device) - (ends - counts).repeat_interleave(counts)
    return firsts.repeat_interleave(counts) + offsets, starts.repeat_interleave(counts) + offsets


def _with_what_was(places: Tensor, counts: Tensor) -> Tensor:
    """Return indices into [previous vectors; tokens]: for each chunk its previous vector, if any, then its tokens."""
    num_chunks = len(counts)
    order = torch.empty(num_chunks + len(places), dtype=torch.int64, device=counts.device)
    ends = counts.cumsum(0)
    at = ends - counts + torch.arange(num_chunks, device=counts.device)
    is_token = torch.ones(len(order), dtype=torch.bool, device=counts.device)
    is_token[at] = False
    order[at] = torch.arange(num_chunks, device=counts.device)
    order[is_token] = torch.arange(len(places), device=counts.device) + num_chunks
    return order


# Bounds the float32 copy of gathered keys in batched decode attention (elements, 128 MiB).
_GATHER_ELEMENTS = 1 << 25

# For activations quantized to 8 bits: largest code, number of steps, and the magnitude below which they are 0.
_ACTIVATION_MAX, _RANGE_STEPS, _ACTIVATION_MIN = 127.0, 254.0, 1e-30

FP8_MIN_SCALE = 1e-12
"""Least scale of activations: keeps the inverse for a row of zeros finite."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> QuantizedRows:
    return quantize_rows(rms_norm(x, weight, eps))


def fused_add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    normed, total = fused_add_rms_norm(x, residual, weight, eps)
    return quantize_rows(normed), total


def quantize_rows(x: Tensor) -> QuantizedRows:
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=FP8_MIN_SCALE)
    return QuantizedRows((wide / scales).to(torch.float8_e4m3fn), scales, x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide_bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = (x.float() + residual.float()).to(x.dtype)
    return layer_norm(total, weight, bias, eps), total


_FUNCTIONS: dict[Function, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def activate(x: Tensor, function: Function) -> Tensor:
    return _FUNCTIONS[function](x.float()).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def clamped_swiglu(x: Tensor) -> Tensor:
    """Return gpt-oss's SwiGLU (arXiv:2508.10925): clamped, with a steeper sigmoid, and one added to `up`."""
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(x.dtype)


FUSED_ACTIVATIONS: dict[FusedActivation, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": silu_and_mul,
    "clamped_swiglu": clamped_swiglu,
    **{function: partial(activate, function=function) for function in _FUNCTIONS},
}


def gelu_and_mul(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)


def silu_and_mul_fp8(x: Tensor) -> QuantizedRows:
    return quantize_rows(silu_and_mul(x))


def gelu_and_mul_fp8(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> QuantizedRows:
    return quantize_rows(gelu_and_mul(x, approximate))


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    cos, sin = (
        cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    )  # [T, 1, rot_dim / 2], broadcast over heads
    rot_dim = cos_sin_cache.shape[-1]
    for heads in (q, k):
        _rotate_(heads[..., :rot_dim], cos, sin, interleaved)
    return q, k


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    a, b = first.float(), second.float()
    # a and b may alias x when it is float32: both products are complete before either half is overwritten.
    rotated_first, rotated_second = a * cos - b * sin, b * cos + a * sin
    first.copy_(rotated_first)
    second.copy_(rotated_second)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> None:
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    if k_cache.dtype != torch.int8:
        k_cache[blocks, :, :, offsets] = _stored(k[kept], k_cache.dtype)
        v_cache[blocks, :, offsets] = _stored(v[kept], v_cache.dtype)
        return
    (keys, key_scales), (values, value_scales) = _int8_parts(k_cache, v_cache)
    of_keys, of_values = (None, None) if scales is None else scales
    keys[blocks, :, :, offsets], key_scales[blocks, :, offsets] = _quantize(k[kept], of_keys)
    values[blocks, :, offsets], value_scales[blocks, :, offsets] = _quantize(v[kept], of_values)


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
    for heads, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            heads.copy_(rms_norm(heads, weight, eps))
    rotary_embedding(positions, q, k, cos_sin_cache, interleaved)
    write_kv(k, v, k_cache, v_cache, slot_mapping, scales)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to the cache's dtype; E4M3 saturates, where torch alone would give NaN."""
    return (x.clamp(-FP8_MAX, FP8_MAX) if dtype == torch.float8_e4m3fn else x).to(dtype)


def _int8_parts(k_cache: Tensor, v_cache: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Views of an int8 cache: (codes, float32 scales [num_blocks, Hkv, block_size]) of keys and of values."""
    size = k_cache.shape[2] - 4
    key_scales = k_cache[:, :, size:].flatten(2).view(torch.float32)
    value_scales = v_cache[..., size:].view(torch.float32).squeeze(-1)
    return (k_cache[:, :, :size], key_scales), (v_cache[..., :size], value_scales)


def _quantize(x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 codes of [T, Hkv, D] and the scale of each vector; one that is not finite has scale NaN and codes 0."""
    wide = x.float()
    amax = wide.abs().amax(-1)
    scale = torch.where(amax.isfinite(), amax / 127 if given is None else given, torch.nan)
    codes = (wide / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)).round().clamp(-128, 127)
    return codes.nan_to_num(0.0).to(torch.int8), scale


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    check_features(q, sliding_window, attention_chunk, soft_cap, alibi_slopes, sinks, relative_bias)
    check_last_seen(metadata, len(q), attention_chunk)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for rows, requests, query_len, seq_len in _groups(metadata, k_cache):
        keys, values = gather_blocks(k_cache, v_cache, metadata.block_tables[requests], seq_len)
        queries = q[rows].float().view(len(keys), query_len, *q.shape[1:]).transpose(1, 2)
        scores = _scores(queries, keys, scale, soft_cap)
        distance = _distance(metadata.seq_lens[requests], query_len, seq_len)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.float()[:, None, None] * distance.abs()
        if relative_bias is not None:
            scores = scores + biases_of(relative_bias, distance.squeeze(1))
        last_seen = None if metadata.last_seen is None else metadata.last_seen[rows].view(distance.shape[:-1])
        hidden = ~seen_keys(distance, seq_len, sliding_window, attention_chunk, last_seen)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        # A padding request of length 0 hides every key; its row is 0 and not NaN.
        weights = scores.softmax(-1)[..., :seq_len].nan_to_num(0.0)
        # Unwritten slots can hold NaN, which a weight of 0 would not cancel.
        unseen = hidden.all(dim=2).unsqueeze(-1)
        mixed = weights @ _repeat_heads(values.masked_fill(unseen, 0.0), q.shape[1])
        out[rows] = mixed.transpose(1, 2).reshape(-1, *q.shape[1:]).to(q.dtype)
    return out


def _groups(metadata: AttentionMetadata, k_cache: Tensor) -> list[tuple[slice, slice, int, int]]:
    """Split the batch into (query rows, requests, query length, padded sequence length) of equal query lengths.

    Decode requests are processed many at a time, others one by one.
    """
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    count = len(lengths)
    if count and starts == list(range(count + 1)):
        longest = max(*lengths, 1)
        size = max(1, _GATHER_ELEMENTS // (longest * k_cache.shape[1] * k_cache.shape[2]))
        bounds = [(i, min(i + size, count)) for i in range(0, count, size)]
        return [(slice(i, j), slice(i, j), 1, longest) for i, j in bounds]
    return [
        (slice(starts[r], starts[r + 1]), slice(r, r + 1), starts[r + 1] - starts[r], lengths[r])
        for r in range(count)
        if starts[r + 1] > starts[r]
    ]


def gather_blocks(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_len: int
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of each request's first `seq_len` tokens as float32 [R, Hkv, seq_len, D]."""
    num_blocks = -(-seq_len // k_cache.shape[3])
    # Entries past a shorter request's last block may hold anything: clamp them to the valid range, the mask hides their
    # keys.
    table = block_tables[:, :num_blocks].long().clamp(0, k_cache.shape[0] - 1)
    if k_cache.dtype == torch.int8:
        (keys, key_scales), (values, value_scales) = _int8_parts(k_cache, v_cache)
        blocks = (
            keys[table].float().transpose(-1, -2) * key_scales[table].unsqueeze(-1),
            values[table].float() * value_scales[table].unsqueeze(-1),
        )
    else:
        blocks = k_cache[table].float().transpose(-1, -2), v_cache[table].float()
    # [R, num_blocks, Hkv, block_size, D] -> [R, Hkv, num_blocks * block_size, D]
    keys, values = (part.transpose(1, 2).flatten(2, 3)[:, :, :seq_len] for part in blocks)
    return keys, values


def _scores(queries: Tensor, keys: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    scores = queries @ _repeat_heads(keys, queries.shape[1]).transpose(-1, -2) * scale
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _distance(seq_lens: Tensor, query_len: int, padded_len: int) -> Tensor:
    """Return query position minus key position, [R, 1, query_len, padded_len]; negative = a future key."""
    device = seq_lens.device
    positions = seq_lens[:, None] - query_len + torch.arange(query_len, device=device)
    return (positions[:, :, None] - torch.arange(padded_len, device=device)).unsqueeze(1)


def seen_keys(
    distance: Tensor,
    padded_len: int,
    sliding_window: int | None,
    attention_chunk: int | None,
    last_seen: Tensor | None = None,
) -> Tensor:
    """Return which keys are visible at distances [..., query_len, padded_len] from the queries; keys are at 0, 1, 2
    ...

    `last_seen` [..., query_len] is the last visible position of each query; None: its own.
    """
    keys = torch.arange(padded_len, device=distance.device)
    seen = distance >= 0 if last_seen is None else keys <= last_seen.unsqueeze(-1)
    if sliding_window is not None:
        seen &= distance < sliding_window
    if attention_chunk is not None:
        seen &= (distance + keys) // attention_chunk == keys // attention_chunk
    return seen


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if x.device.type != "cpu":
        return _vendor_linear(x, weight, bias, dtype or x.dtype)
    # torch's 16-bit GEMM is a scalar loop on CPUs without AVX-512: multiplying in float32 is far faster.
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(dtype or x.dtype)


def _vendor_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply with the vendor's library; sums are converted directly to `dtype` if torch supports it, else through
    x's.
    """
    if dtype == x.dtype or x.device.type != "cuda" or torch.version.hip:
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(dtype)
    out: Tensor = torch.ops.aten.mm.dtype(x.flatten(0, -2), weight.t(), dtype).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def pack_weight(weight: Tensor, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    return format_of(scheme).pack(weight, scheme, halves, "panels")


def unpack_weight(weight: PackedWeight) -> Tensor:
    """Return the dequantized weight [N, K]: in its own dtype, float32 if it was quantized."""
    return format_of(weight.scheme).unpack(weight)


def packed_linear(
    x: Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: FusedActivation | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = linear(quantized_input(weight, x), format_of(weight.scheme).multiplied(weight).float(), bias)
    return (out if activation is None else FUSED_ACTIVATIONS[activation](out)).to(dtype or x.dtype)


def round_rows(x: Tensor, rounding: RowQuantization) -> Tensor:
    size = x.shape[-1]
    group = max(min(rounding.group or size, size), 1)
    groups = F.pad(x.float(), (0, -size % group)).unflatten(-1, (-1, group))
    top = FP8_MAX if rounding.codes == "e4m3" else _ACTIVATION_MAX
    if rounding.scale is not None:
        scale = torch.tensor(rounding.scale, dtype=torch.float32, device=x.device)
        zero = torch.tensor(rounding.zero, dtype=torch.float32, device=x.device)
    else:
        scale, zero = _step_of(groups, rounding, top)
    if rounding.codes == "e4m3":
        codes = (groups / scale).clamp(-top, top).to(torch.float8_e4m3fn).float()
    else:
        codes = (groups / scale + zero).clamp(rounding.lowest, top).round() - zero
    return (codes * scale).flatten(-2)[..., :size].to(x.dtype)


def rounded_linear(
    x: Tensor, weight: PackedWeight, rounding: RowQuantization, bias: Tensor | None = None
) -> Tensor:
    precise = replace(weight, scheme=replace(weight.scheme, fast=False))
    return packed_linear(round_rows(x, rounding), precise, bias)


def _step_of(groups: Tensor, rounding: RowQuantization, top: float) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points computed for groups [..., G, group], [..., G, 1]."""
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    is_finite = groups.isfinite().all(-1, keepdim=True)
    lowest = -top if rounding.codes == "e4m3" else rounding.lowest
    if rounding.symmetric:
        most = torch.maximum(high, -low)
        scale = (most if rounding.bound is None else most.clamp(max=rounding.bound)) / ((top - lowest) / 2)
    else:
        scale = (high - low) / (top - lowest)
    divisor = torch.where(scale == 0, 1.0, scale)
    zero = (
        torch.zeros_like(low) if rounding.symmetric else (lowest - low / divisor).clamp(lowest, top).round()
    )
    zero = torch.where(scale == 0, 0.0, zero)
    return torch.where(is_finite, divisor, torch.nan), torch.where(is_finite, zero, 0.0)


def quantized_input(weight: PackedWeight, x: Tensor | QuantizedRows) -> Tensor:
    """Return activations as quantized for this weight, in float32."""
    scheme = weight.scheme
    if isinstance(x, QuantizedRows):
        return x.float()
    if scheme.kind == "fp8":
        rounds = weight.layout == "rows" and not scheme.group_size and scheme.fast
        return (quantize_rows(x) if rounds else x).float()
    if not scheme.fast:
        return x.float()
    if scheme.kind == "float":
        return (x.bfloat16() if weight.data.dtype == torch.bfloat16 else x).float()
    together = format_of(scheme).together
    size = CHUNK if together or scheme.is_plain_int8 else SPAN
    spans = whole_chunks(x.float()).unflatten(-1, (-1, size))
    rounded = _rounded(spans, together) if together else _rounded_in_range(spans)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def _rounded_in_range(x: Tensor) -> Tensor:
    """Quantize each row in steps of 1/254 of the range of its values and 0; NaN if a value is not finite."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = high / _RANGE_STEPS - low / _RANGE_STEPS
    steps = (x * (1 / scale)).round() * scale
    return torch.where(scale >= _ACTIVATION_MIN, steps, 0.0 * x)


def _rounded(x: Tensor, together: int) -> Tensor:
    """Quantize each row in steps of 1/127 of the largest magnitude sum of `together` neighbours; NaN if a value is not
    finite.
    """
    largest = x.abs().unflatten(-1, (-1, together)).sum(-1).amax(-1, keepdim=True)
    # torch computes a Python number / tensor as a product with the reciprocal, which rounds differently.
    inverse = torch.full_like(largest, _ACTIVATION_MAX) / largest
    steps = (x * inverse).round() * (largest / _ACTIVATION_MAX)
    return torch.where(largest >= _ACTIVATION_MIN, steps, 0.0 * x)


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    return unpack_weight(weight).float()[ids]


def per_head_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    matrices = torch.unflatten(format_of(weight.scheme).multiplied(weight).float(), 0, (x.shape[1], -1))
    return torch.einsum("thk,hnk->thn", quantized_input(weight, x), matrices).to(x.dtype)


def write_latents(
    positions: Tensor,
    q: Tensor,
    rows: Tensor,
    norm: Tensor,
    cos_sin_cache: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool = False,
) -> None:
    latents, keys = rms_norm(rows[:, : len(norm)], norm, eps), rows[:, None, len(norm) :].clone()
    rotary_embedding(positions, q, keys, cos_sin_cache, interleaved)
    kept = slot_mapping >= 0
    stored = torch.cat([latents, keys.squeeze(1)], 1)[kept].to(cache.dtype)
    cache.view(-1, cache.shape[2])[slot_mapping[kept]] = stored


def latent_attention(
    q: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    values = cache.unsqueeze(1)
    keys = values.transpose(2, 3)
    out = paged_attention(torch.cat([q, q_rope], 2), keys, values, metadata, scale)
    return out[..., : q.shape[2]].contiguous()
