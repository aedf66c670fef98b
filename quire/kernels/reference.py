"""The plain-torch oracle of every op: obviously right, and used where no faster implementation applies.

Invariant: arithmetic is float32 whatever the input dtype, rounded once at the end.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, check_features
from quire.kernels.formats import FP8_MAX, format_of, whole_chunks
from quire.kernels.linear import CHUNK, Ending, Function, PackedWeight, QuantizedRows, WeightScheme
from quire.kernels.rounding import RowRounding

# Bounds the float32 copy of gathered keys that batched decode attention makes (elements, 128 MiB).
_GATHER_ELEMENTS = 1 << 25

# Of activations that are rounded to 8 bits: the largest step, and the magnitude below which they are 0.
_ACTIVATION_MAX, _RANGE_STEPS, _ACTIVATION_MIN = 127.0, 254.0, 1e-30

FP8_MIN_SCALE = 1e-12
"""Of activations: keeps the inverse of a row of zeros finite."""


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
    """The SwiGLU of gpt-oss (arXiv:2508.10925): bounded, with a steeper sigmoid, and one added to `up`."""
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(x.dtype)


ENDINGS: dict[Ending, Callable[[Tensor], Tensor]] = {
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
    """In E4M3 what is too large becomes the largest number; by itself torch would make it NaN."""
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
) -> Tensor:
    check_features(q, sliding_window, attention_chunk, soft_cap, alibi_slopes, sinks)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for rows, requests, query_len, seq_len in _groups(metadata, k_cache):
        keys, values = gather_blocks(k_cache, v_cache, metadata.block_tables[requests], seq_len)
        queries = q[rows].float().view(len(keys), query_len, *q.shape[1:]).transpose(1, 2)
        scores = _scores(queries, keys, scale, soft_cap)
        distance = _distance(metadata.seq_lens[requests], query_len, seq_len)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.float()[:, None, None] * distance
        hidden = ~seen_keys(distance, seq_len, sliding_window, attention_chunk)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        # A padding request of length 0 hides every key; its row is 0 and not NaN.
        weights = scores.softmax(-1)[..., :seq_len].nan_to_num(0.0)
        # Memory no query may see can hold NaN, which a weight of 0 would not cancel.
        unseen = hidden.all(dim=2).unsqueeze(-1)
        mixed = weights @ _repeat_heads(values.masked_fill(unseen, 0.0), q.shape[1])
        out[rows] = mixed.transpose(1, 2).reshape(-1, *q.shape[1:]).to(q.dtype)
    return out


def _groups(metadata: AttentionMetadata, k_cache: Tensor) -> list[tuple[slice, slice, int, int]]:
    """The batch as (query rows, requests, query length, padded sequence length) of equal query lengths.

    Decode requests are taken many at a time, others one by one.
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
    """The keys and values of the first `seq_len` tokens of each request as float32 [R, Hkv, seq_len, D]."""
    num_blocks = -(-seq_len // k_cache.shape[3])
    # Entries past a shorter request's last block may hold anything: keep them in range, the mask hides what
    # they say.
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
    """Query position minus key position, [R, 1, query_len, padded_len]; negative = a future key."""
    device = seq_lens.device
    positions = seq_lens[:, None] - query_len + torch.arange(query_len, device=device)
    return (positions[:, :, None] - torch.arange(padded_len, device=device)).unsqueeze(1)


def seen_keys(
    distance: Tensor, padded_len: int, sliding_window: int | None, attention_chunk: int | None
) -> Tensor:
    """Which keys are seen at such distances [..., query_len, padded_len] from the queries; keys are at 0, 1, 2 ..."""
    seen = distance >= 0
    if sliding_window is not None:
        seen &= distance < sliding_window
    if attention_chunk is not None:
        keys = torch.arange(padded_len, device=distance.device)
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
    """Sums leave the product as they are where torch offers that, and rounded to x's dtype elsewhere."""
    if dtype == x.dtype or x.device.type != "cuda" or torch.version.hip:
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(dtype)
    out: Tensor = torch.ops.aten.mm.dtype(x.flatten(0, -2), weight.t(), dtype).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def pack_weight(weight: Tensor, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    return format_of(scheme).pack(weight, scheme, halves, "panels")


def unpack_weight(weight: PackedWeight) -> Tensor:
    """The matrix [N, K] that a packed one stands for: its own dtype, float32 where it was quantised."""
    return format_of(weight.scheme).unpack(weight)


def packed_linear(
    x: Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: Tensor | None = None,
    activation: Ending | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = linear(seen_by(weight, x), format_of(weight.scheme).multiplied(weight).float(), bias)
    return (out if activation is None else ENDINGS[activation](out)).to(dtype or x.dtype)


def round_rows(x: Tensor, rounding: RowRounding) -> Tensor:
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
    x: Tensor, weight: PackedWeight, rounding: RowRounding, bias: Tensor | None = None
) -> Tensor:
    precise = replace(weight, scheme=replace(weight.scheme, fast=False))
    return packed_linear(round_rows(x, rounding), precise, bias)


def _step_of(groups: Tensor, rounding: RowRounding, top: float) -> tuple[Tensor, Tensor]:
    """Scales and zero points that groups [..., G, group] find, [..., G, 1]."""
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


def seen_by(weight: PackedWeight, x: Tensor | QuantizedRows) -> Tensor:
    """Activations as a weight sees them, in float32."""
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
    chunks = whole_chunks(x.float()).unflatten(-1, (-1, CHUNK))
    together = format_of(scheme).together
    rounded = _rounded(chunks, together) if together else _rounded_in_range(chunks)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def _rounded_in_range(x: Tensor) -> Tensor:
    """Each row in steps of a 254th of the range of its values and 0; NaN if a value is not finite."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = high / _RANGE_STEPS - low / _RANGE_STEPS
    steps = (x * (1 / scale)).round() * scale
    return torch.where(scale >= _ACTIVATION_MIN, steps, 0.0 * x)


def _rounded(x: Tensor, together: int) -> Tensor:
    """Each row in steps of a 127th of what the magnitudes of so many neighbours come to at most; NaN if a value is not
    finite."""
    largest = x.abs().unflatten(-1, (-1, together)).sum(-1).amax(-1, keepdim=True)
    # A number divided by a tensor would be its product with the reciprocal, which rounds differently.
    inverse = torch.full_like(largest, _ACTIVATION_MAX) / largest
    steps = (x * inverse).round() * (largest / _ACTIVATION_MAX)
    return torch.where(largest >= _ACTIVATION_MIN, steps, 0.0 * x)


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    return unpack_weight(weight).float()[ids]
