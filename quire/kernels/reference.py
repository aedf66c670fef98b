# SPDX-License-Identifier: Apache-2.0
"""Plain-torch oracles of the ops of a dense decoder: obviously right, and used if no faster implementation applies.

Modules `reference_*` have the others. A signature and its docstring are the contract of all implementations.
Invariant: arithmetic is float32 whatever the input dtype, rounded once at the end.

Shapes: T tokens of the step, H hidden size, I intermediate size, Hq/Hkv query and key-value heads, D head size, R
requests, V vocabulary rows, P positions. Tensors are contiguous in their last dimension.

A KV cache is a pair of tensors that share the memory of a block in equal parts:

    k_cache [num_blocks, Hkv, D, block_size] and v_cache [num_blocks, Hkv, block_size, D],

contiguous on a CPU, of any float dtype. On a GPU keys lie in memory as values do, and k_cache is the transposed view: a
token's key is one piece, which threads read side by side. In int8 D, a multiple of 4, is larger by 4: behind a head's
keys stand block_size float32 scales, and behind each value stands its own. What is stored is round(x / scale), with
scale = amax / 127 for each token and head. In E4M3 (float8_e4m3fn, on GPUs) there are no scales, and what is larger
than 448 is stored as 448.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, check_features, check_last_seen
from quire.kernels.formats import FP8_MAX, format_of, whole_chunks
from quire.kernels.linear import (
    CHUNK,
    SPAN,
    Function,
    FusedActivation,
    PackedWeight,
    QuantizedRows,
    WeightScheme,
)


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


# Bounds the float32 copy of gathered keys in batched decode attention (elements, 128 MiB).
_GATHER_ELEMENTS = 1 << 25

# For activations quantized to 8 bits: largest code, number of steps, and the magnitude below which they are 0.
ACTIVATION_MAX, _RANGE_STEPS, _ACTIVATION_MIN = 127.0, 254.0, 1e-30

FP8_MIN_SCALE = 1e-12
"""Least scale of activations: keeps the inverse for a row of zeros finite."""


def rms_norm(x: Tensor, weight: Tensor, /, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension.

    x [..., H] any float dtype; weight [H] of x's dtype or float32. Computed in float32 with one rounding at the end,
    returned in x's dtype and shape.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, /, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`, both new tensors of x's dtype and shape.

    x, residual [..., H] of one dtype; weight as in `rms_norm`. The norm is computed from the sum as rounded to x's
    dtype.
    """
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def quantize_rows(x: Tensor) -> QuantizedRows:
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=FP8_MIN_SCALE)
    return QuantizedRows((wide / scales).to(torch.float8_e4m3fn), scales, x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, /, eps: float) -> Tensor:
    """`(x - mean) / std * weight + bias` over the last dimension; shapes and dtypes as in `rms_norm`."""
    wide_bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, /, eps: float
) -> tuple[Tensor, Tensor]:
    """`(layer_norm(x + residual), x + residual)`, as in `fused_add_rms_norm`."""
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


def activate(x: Tensor, /, function: Function) -> Tensor:
    """Apply an elementwise `Function`, such as "gelu": x [..., I], returned in x's dtype and shape."""
    return _FUNCTIONS[function](x.float()).to(x.dtype)


def silu_and_mul(x: Tensor, /) -> Tensor:
    """`silu(first half) * second half`: x [..., 2 * I] -> [..., I] of x's dtype."""
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


def gelu_and_mul(x: Tensor, /, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """`gelu(first half) * second half`: x [..., 2 * I] -> [..., I] of x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, /, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by their positions, in place, and return them.

    positions [T] int64 in [0, P); q [T, Hq, D] and k [T, Hkv, D], Hkv may be 0, of one dtype, views with a token stride
    allowed; cos_sin_cache [P, rot_dim] float32 = cat(cos, sin), rot_dim even and <= D (the rest of each head is
    unchanged). The pairs are (i, i + rot_dim / 2), or (2 i, 2 i + 1) when interleaved. A position outside the cache is
    an IndexError.
    """
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
    /,
    scales: Tensor | None = None,
) -> None:
    """Store each token's key and value in its slot.

    k, v [T, Hkv, D], views with a token stride allowed; slot_mapping [T] int64, slot = block_id * block_size + offset,
    all different; a negative slot is skipped, one past the cache is an IndexError. For an int8 cache, scales, float32
    [2, Hkv], may be given for the keys and the values of each head; codes are then clamped to -128 .. 127.
    """
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
    /,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
) -> None:
    """`rotary_embedding` on q and k, in place, then `write_kv`, in one pass and with the same bits.

    With norms, which both or neither have, each head's `rms_norm` is rotated: weights [D] of one dtype, q's or float32.
    scales as in `write_kv`.
    """
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
    /,
    scale: float,
    *,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """Causal attention of each request's last tokens over its cached keys and values: a new [T, Hq, D].

    q [T, Hq, D], a view with a token stride allowed; caches as above, Hq a multiple of Hkv (query head h reads head h
    // (Hq / Hkv)); the step's own keys are already written. Score of query position i and key position j: s = scale *
    q.k; with `soft_cap` c, s = c * tanh(s / c); with `alibi_slopes` [Hq], s - slope * (i - j). With `sliding_window` w,
    only i - w < j <= i is visible; with `attention_chunk` c, only j <= i with i // c = j // c. With `sinks` [Hq], every
    softmax has one more score, its head's, without a value (G. Xiao et al., 2023, arXiv:2309.17453). With
    `relative_bias` float32 [Hq, 2 * P - 1], s plus entry P - 1 + j - i, for requests of up to P tokens. With
    `metadata.last_seen` l, j <= l_i replaces j <= i, and a slope's bias is by the distance's magnitude. Padding rows
    are 0. A required block id outside the cache, an l out of bounds, or a request longer than P is an IndexError.
    """
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


def embedding(ids: Tensor, weight: Tensor, /) -> Tensor:
    """Rows of a table: ids [T] int64 in [0, V), weight [V, H] -> [T, H]; any other id is an IndexError."""
    return F.embedding(ids, weight)


def linear(
    x: Tensor, weight: Tensor, /, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """`x @ weight.T + bias`: x [..., K], weight [N, K], bias [N] -> [..., N] of x's dtype, or of `dtype`.

    With another dtype, sums are rounded to it once if the vendor's library supports that. This op is plain torch, which
    on a GPU is the vendor's library. Layers pack their weights and call `packed_linear` on a CPU with C++ kernels, and
    on a GPU if the weight is quantized or must be batch-invariant.
    """
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


def pack_weight(weight: Tensor, /, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    """Pack a weight [N, K] of any float dtype into the layout of `packed_linear`, quantized as the scheme says.

    N is a multiple of `halves`, which is 2 if gate and up are stacked. int8: q = round(w / s) with s the largest
    magnitude of a row / 127, or of a group, rounded to float16 if float16 holds it to 2^-8; a weight with a group that
    float16 does not hold keeps all scales in float32. int4: symmetric, s = f * (the value of largest magnitude of a
    group) / -8 and w = s * (q - 8); else s = f * (largest - smallest, 0 included) / 15 and w = s * (q - z); s is
    rounded to bfloat16 first, and f, from 11/16 to 18/16, is the factor with the least squared error in the group. fp8:
    E4M3 of w / s with s the largest magnitude of a row, or of the tensor, / 448. A non-finite value makes its scale
    non-finite.
    """
    return format_of(scheme).pack(weight, scheme, halves, "panels")


def unpack_weight(weight: PackedWeight) -> Tensor:
    """Return the dequantized weight [N, K]: in its own dtype, float32 if it was quantized."""
    return format_of(weight.scheme).unpack(weight)


def packed_linear(
    x: Tensor | QuantizedRows,
    weight: PackedWeight,
    /,
    bias: Tensor | None = None,
    activation: FusedActivation | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias`: x [..., K], bias float32 [N] -> [..., N] of x's dtype, or of `dtype`.

    On a CPU, an integer weight with a fast scheme quantizes x to 8 bits: 64 values of k of a row use steps of 1/254 of
    the range of the values and 0 (int8; 32 values, if the weight has groups), of their largest magnitude / 127 (int4),
    or of the largest magnitude sum of a pair, k and k + 1 with k even, / 127 (codebook formats). An fp8 weight
    quantizes a row of x to E4M3 times its largest magnitude / 448, and takes x [T, K] in that form, too.

    `activation` is applied to the result. For a weight in two halves, [..., N / 2], it is `ops.silu_and_mul` or
    "clamped_swiglu": with g = min(gate, 7) and u = up in [-7, 7], (u + 1) * g * sigmoid(1.702 g). For any other weight
    it is one of `ops.activate`, bit-identical to applying it separately.
    """
    out = linear(quantized_input(weight, x), format_of(weight.scheme).multiplied(weight).float(), bias)
    return (out if activation is None else FUSED_ACTIVATIONS[activation](out)).to(dtype or x.dtype)


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
    """Quantize each row in steps of 1/127 of the largest magnitude sum of `together` neighbors; NaN if a value is not
    finite.
    """
    largest = x.abs().unflatten(-1, (-1, together)).sum(-1).amax(-1, keepdim=True)
    # torch computes a Python number / tensor as a product with the reciprocal, which rounds differently.
    inverse = torch.full_like(largest, ACTIVATION_MAX) / largest
    steps = (x * inverse).round() * (largest / ACTIVATION_MAX)
    return torch.where(largest >= _ACTIVATION_MIN, steps, 0.0 * x)


def packed_embedding(ids: Tensor, weight: PackedWeight, /) -> Tensor:
    """Rows of a packed table: ids [T] int64 in [0, N) -> float32 [T, K]. An id outside is an IndexError."""
    return unpack_weight(weight).float()[ids]
