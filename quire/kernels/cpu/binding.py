"""The C++ kernels as Python functions on tensors, with every check of device, dtype, shape and layout.

Invariant: no address reaches C++ before the tensor behind it was checked, and the tensor outlives the call.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cpu import library


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    code = _code("rms_norm", "x", x)
    _check_weight("rms_norm", "weight", x, weight)
    x, outer, inner, outer_stride, inner_stride = _rows(x)
    out = x.new_empty(*x.shape)
    args = (outer, inner, outer_stride, inner_stride, x.shape[-1], eps, code, _CODES[weight.dtype])
    _call("rms_norm", (out, x, weight), *args)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    code = _code("fused_add_rms_norm", "x", x)
    _check_weight("fused_add_rms_norm", "weight", x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_cpu:
        raise ValueError(f"fused_add_rms_norm: residual is {_say(residual)} but x is {_say(x)}")
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // weight.shape[0]
    args = (rows, x.shape[-1], eps, code, _CODES[weight.dtype])
    _call("fused_add_rms_norm", (out, total, x, residual, weight), *args)
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    code = _code("layer_norm", "x", x)
    _check_weight("layer_norm", "weight", x, weight)
    if bias is not None:
        _check_weight("layer_norm", "bias", x, bias)
        if bias.dtype != weight.dtype:
            raise TypeError(f"layer_norm: bias must be {weight.dtype} as weight is; it is {bias.dtype}")
    x, outer, inner, outer_stride, inner_stride = _rows(x)
    out = x.new_empty(*x.shape)
    args = (outer, inner, outer_stride, inner_stride, x.shape[-1], eps, code, _CODES[weight.dtype])
    _call("layer_norm", (out, x, weight, bias), *args)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    x, out, *args = _halves("silu_and_mul", x)
    _call("silu_and_mul", (out, x), *args, _CODES[x.dtype])
    return out


def gelu_and_mul(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu_and_mul: approximate must be 'none' or 'tanh'; it is {approximate!r}")
    x, out, *args = _halves("gelu_and_mul", x)
    _call("gelu_and_mul", (out, x), *args, int(approximate == "tanh"), _CODES[x.dtype])
    return out


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    code = _code("rotary_embedding", "q", q)
    queries, keys = _heads("rotary_embedding", "q", q, q.dtype), _heads("rotary_embedding", "k", k, q.dtype)
    num_positions, rot_dim = _check_rotary("rotary_embedding", positions, queries, keys, cos_sin_cache)
    args = (queries.tokens, num_positions, rot_dim, *queries[1:4], *keys[1:4], int(interleaved), code)
    refused = _call("rotary_embedding", (q, k, positions, cos_sin_cache), *args)
    if refused:
        raise IndexError(
            f"rotary_embedding: {refused} positions are outside the cache of {num_positions} positions"
        )
    return q, k


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    code = _code("write_kv", "k", k)
    keys, values = _heads("write_kv", "k", k, k.dtype), _heads("write_kv", "v", v, k.dtype)
    cache = _check_write("write_kv", keys, values, k_cache, v_cache, slot_mapping)
    strides = (keys.token_stride, keys.head_stride, values.token_stride, values.head_stride)
    args = (keys.tokens, keys.heads, *strides, cache.blocks, cache.block_size, keys.size, code, cache.code)
    refused = _call("write_kv", (k, v, k_cache, v_cache, slot_mapping), *args)
    if refused:
        raise IndexError(
            f"write_kv: {refused} slots are outside the cache of {cache.blocks * cache.block_size} slots"
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
) -> None:
    name = "rotary_and_write_kv"
    code = _code(name, "q", q)
    queries, keys, values = (
        _heads(name, "q", q, q.dtype),
        _heads(name, "k", k, q.dtype),
        _heads(name, "v", v, q.dtype),
    )
    num_positions, rot_dim = _check_rotary(name, positions, queries, keys, cos_sin_cache)
    cache = _check_write(name, keys, values, k_cache, v_cache, slot_mapping)
    tensors = (q, k, v, k_cache, v_cache, positions, cos_sin_cache, slot_mapping)
    layout = (*queries[1:4], *keys[1:4], values.token_stride, values.head_stride)
    sizes = (cache.blocks, cache.block_size, keys.size, int(interleaved), code, cache.code)
    refused = _call(name, tensors, keys.tokens, num_positions, rot_dim, *layout, *sizes)
    if refused:
        bounds = f"{num_positions} positions and {cache.blocks * cache.block_size} slots"
        raise IndexError(f"{name}: {refused} tokens are outside the {bounds} of the caches")


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    code = _code("paged_attention", "q", q)
    tokens, q_heads, *strides, size = _heads("paged_attention", "q", q, q.dtype)
    heads = k_cache.shape[1] if k_cache.dim() == 4 else 0
    cache = _check_cache("paged_attention", k_cache, v_cache, heads, size)
    if not heads or q_heads % heads or not q_heads or size % 8 or not size:
        raise ValueError(
            f"paged_attention: q is {_say(q)}; its heads must be a multiple of the cache's {heads}, its head size of 8"
        )
    if (sliding_window is not None and sliding_window < 1) or (soft_cap is not None and not soft_cap > 0):
        raise ValueError(f"paged_attention: window {sliding_window} and soft cap {soft_cap} must be positive")
    starts, lengths, tables = metadata.query_start_loc, metadata.seq_lens, metadata.block_tables
    slopes = None if alibi_slopes is None else _slopes(alibi_slopes, q_heads)
    requests, width = _check_batch(starts, lengths, tables)
    out = q.new_empty(tokens, q_heads, size)
    sizes = (tokens, requests, width, q_heads, *strides, cache.blocks, heads, cache.block_size, size)
    features = (sliding_window or 0, scale, soft_cap or 0.0)
    tensors = (out, q, k_cache, v_cache, starts, lengths, tables, slopes)
    refused = _call("paged_attention", tensors, *sizes, *features, code, cache.code)
    if refused:
        raise IndexError(_bad_request(metadata, refused - 1, cache.blocks))
    return out


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    _check_index("embedding", "ids", ids, ids.shape[0] if ids.dim() else 0)
    _code("embedding", "weight", weight)
    if weight.dim() != 2 or not weight.is_contiguous():
        raise ValueError(f"embedding: weight must be contiguous [V, H]; it is {_say(weight)}")
    (tokens,), (rows, size) = ids.shape, weight.shape
    out = weight.new_empty(tokens, size)
    refused = _call("embedding", (out, ids, weight), tokens, rows, size * weight.itemsize)
    if refused:
        raise IndexError(f"embedding: {refused} ids are outside the table of {rows} rows")
    return out


def _call(name: str, tensors: tuple[Tensor | None, ...], *args: float) -> int:
    kernels = library.loaded()
    assert kernels is not None, "the table of ops asks supports() before it loads a kernel"
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    status = kernels.kernels[name](*addresses, *args)
    if status == _NO_MEMORY:
        raise MemoryError(f"{name}: no memory for the kernel's scratch space")
    if status < 0:
        raise RuntimeError(f"{name}: the kernel library refuses the call ({status}): reinstall quire")
    return status


_CODES = library.DTYPE_CODES
_NO_MEMORY = -2


def _code(op: str, name: str, tensor: Tensor) -> int:
    """The code of a tensor's dtype; it must be on the CPU."""
    if not tensor.is_cpu:
        raise ValueError(f"{op}: {name} must be on the CPU, but is on {tensor.device}")
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, but is {tensor.dtype}")
    return code


def _rows(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """x as rows that two strides give: (x, outer, inner, outer stride, inner stride); a copy if need be."""
    if x.is_contiguous():
        size = x.shape[-1]
        return x, x.numel() // size, 1, size, 0
    if x.dim() == 3 and x.stride(-1) == 1:
        return x, x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2 and x.stride(-1) == 1:
        return x, x.shape[0], 1, x.stride(0), 0
    x = x.contiguous()
    return x, x.numel() // x.shape[-1], 1, x.shape[-1], 0


def _halves(op: str, x: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """A gated activation's (x, output, rows, columns)."""
    _code(op, "x", x)
    *outer, width = x.shape
    if width % 2 or not width:
        raise ValueError(f"{op}: the last dimension must be even and positive; x is {_say(x)}")
    size = width // 2
    x, out = x.contiguous(), x.new_empty(*outer, size)
    return x, out, out.numel() // size, size


def _check_weight(op: str, name: str, x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:] or not weight.numel() or not weight.is_contiguous() or not weight.is_cpu:
        raise ValueError(f"{op}: {name} must be contiguous of shape [{x.shape[-1]}]; it is {_say(weight)}")
    if weight.dtype is not x.dtype and weight.dtype is not torch.float32:
        raise TypeError(f"{op}: {name} must be {x.dtype} or float32; it is {weight.dtype}")


def _check_index(op: str, name: str, index: Tensor, size: int) -> None:
    if (
        index.dtype is not torch.int64
        or index.shape != (size,)
        or not index.is_contiguous()
        or not index.is_cpu
    ):
        raise ValueError(f"{op}: {name} must be contiguous int64 [{size}]; it is {_say(index)}")


class _Heads(NamedTuple):
    """Layout of [tokens, heads, size]."""

    tokens: int
    heads: int
    token_stride: int
    head_stride: int
    size: int


class _Cache(NamedTuple):
    """Layout of a KV cache."""

    blocks: int
    block_size: int
    code: int


def _heads(op: str, name: str, heads: Tensor, dtype: torch.dtype) -> _Heads:
    if heads.dim() != 3 or heads.dtype is not dtype or not heads.is_cpu:
        raise ValueError(
            f"{op}: {name} must be {dtype} [tokens, heads, size] on the CPU; it is {_say(heads)}"
        )
    tokens, num_heads, size = heads.shape
    token_stride, head_stride, stride = heads.stride()
    if stride != 1:
        raise ValueError(f"{op}: {name} must have stride 1 in its last dimension; it has {heads.stride()}")
    return _Heads(tokens, num_heads, token_stride, head_stride, size)


def _check_rotary(op: str, positions: Tensor, q: _Heads, k: _Heads, cache: Tensor) -> tuple[int, int]:
    """The shape of the table of cosines and sines."""
    _check_index(op, "positions", positions, q.tokens)
    shape = cache.shape
    if cache.dtype is not torch.float32 or len(shape) != 2 or shape[1] % 2 or not cache.is_contiguous():
        raise ValueError(f"{op}: cos_sin_cache must be float32 [P, even]; it is {_say(cache)}")
    num_positions, rot_dim = shape
    for name, heads in (("q", q), ("k", k)):
        if heads.tokens != q.tokens or heads.size < rot_dim:
            found = f"[{heads.tokens}, {heads.heads}, {heads.size}]"
            raise ValueError(f"{op}: {name} must be [{q.tokens}, heads, >= {rot_dim}]; it is {found}")
    if not cache.is_cpu:
        raise ValueError(f"{op}: cos_sin_cache must be on the CPU, but is on {cache.device}")
    return num_positions, rot_dim


def _check_write(op: str, k: _Heads, v: _Heads, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> _Cache:
    if v.tokens != k.tokens or v.heads != k.heads or v.size != k.size:
        shapes = f"[{v.tokens}, {v.heads}, {v.size}] and [{k.tokens}, {k.heads}, {k.size}]"
        raise ValueError(f"{op}: v must be of k's shape; they are {shapes}")
    _check_index(op, "slot_mapping", slots, k.tokens)
    return _check_cache(op, k_cache, v_cache, k.heads, k.size)


def _check_cache(op: str, k_cache: Tensor, v_cache: Tensor, heads: int, size: int) -> _Cache:
    """The layout of a cache for this many key-value heads of this size."""
    dtype = k_cache.dtype
    code = library.CACHE_DTYPE_CODES.get(dtype)
    stored = size + 4 if dtype is torch.int8 else size
    if code is None or v_cache.dtype is not dtype:
        raise TypeError(f"{op}: the caches are {dtype} and {v_cache.dtype}; both must be float or int8")
    shape = k_cache.shape
    good = len(shape) == 4 and shape[1] == heads and shape[2] == stored and shape[3] > 0
    if not good or v_cache.shape != (shape[0], heads, shape[3], stored):
        raise ValueError(
            f"{op}: caches for {heads} heads of {size} must be {dtype} [blocks, {heads}, {stored}, block size] and "
            f"[blocks, {heads}, block size, {stored}]; they are {_say(k_cache)} and {_say(v_cache)}"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.is_cpu and v_cache.is_cpu):
        raise ValueError(f"{op}: the caches must be contiguous and on the CPU")
    return _Cache(shape[0], shape[3], code)


def _check_batch(starts: Tensor, lengths: Tensor, tables: Tensor) -> tuple[int, int]:
    """(requests, block ids of each)."""
    shape = tables.shape
    if len(shape) != 2 or lengths.shape != shape[:1] or starts.shape != (shape[0] + 1,):
        shapes = ", ".join(map(_say, (starts, lengths, tables)))
        raise ValueError(f"paged_attention: metadata must be [R + 1], [R] and [R, blocks]; it is {shapes}")
    for tensor in (starts, lengths, tables):
        if tensor.dtype is not torch.int32 or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(f"paged_attention: metadata must be contiguous int32; it has {_say(tensor)}")
    return shape[0], shape[1]


def _slopes(slopes: Tensor, heads: int) -> Tensor:
    if slopes.shape != (heads,) or not slopes.is_cpu:
        raise ValueError(f"paged_attention: alibi_slopes must be [{heads}]; it is {_say(slopes)}")
    return slopes.float().contiguous()


def _bad_request(metadata: AttentionMetadata, request: int, num_blocks: int) -> str:
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    if request == len(lengths):
        return f"paged_attention: query_start_loc {starts} does not fit the rows of q"
    row = metadata.block_tables[request].tolist()
    return (
        f"paged_attention: request {request} with rows [{starts[request]}, {starts[request + 1]}), {lengths[request]} "
        f"tokens and blocks {row} does not fit q or the cache of {num_blocks} blocks"
    )


def _say(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def non_finite_rows(logits: Tensor) -> Tensor:
    _check_logits("non_finite_rows", logits)
    out = torch.empty(logits.shape[0], dtype=torch.bool)
    _call("non_finite_rows", (out, logits), *logits.shape)
    return out


def apply_penalties(logits: Tensor, indices: Tensor, repetition: Tensor, subtracted: Tensor) -> None:
    _check_logits("apply_penalties", logits)
    shape = indices.shape[:1]
    _check_array("apply_penalties", "indices", indices, torch.int64, shape)
    _check_array("apply_penalties", "repetition", repetition, torch.float64, shape)
    _check_array("apply_penalties", "subtracted", subtracted, torch.float64, shape)
    tensors = (logits, indices, repetition, subtracted)
    refused = _call("apply_penalties", tensors, indices.shape[0], logits.numel())
    if refused:
        raise IndexError(f"apply_penalties: {refused} indices are outside the {logits.numel()} logits")


def philox_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    shape = seeds.shape[:1]
    _check_array("philox_uniform", "seeds", seeds, torch.int64, shape)
    _check_array("philox_uniform", "positions", positions, torch.int64, shape)
    out = torch.empty(shape, dtype=torch.float64)
    _call("philox_uniform", (out, seeds, positions), shape[0])
    return out


def sample_tokens(logits: Tensor, settings: Tensor, uniforms: Tensor) -> Tensor:
    _check_logits("sample_tokens", logits)
    rows = logits.shape[0]
    _check_array("sample_tokens", "settings", settings, torch.float64, (rows, 4))
    _check_array("sample_tokens", "uniforms", uniforms, torch.float64, (rows,))
    out = torch.empty(rows, dtype=torch.int64)
    _call("sample_tokens", (out, logits, settings, uniforms), *logits.shape)
    return out


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_logits("token_logprobs", logits)
    rows, vocab_size = logits.shape
    _check_array("token_logprobs", "chosen", chosen, torch.int64, (rows,))
    if not 0 <= num_top <= vocab_size:
        raise ValueError(f"token_logprobs: num_top must be in [0, {vocab_size}]; it is {num_top}")
    ids = torch.empty((rows, 1 + num_top), dtype=torch.int64)
    logprobs = torch.empty((rows, 1 + num_top), dtype=torch.float32)
    ranks = torch.empty(rows, dtype=torch.int64)
    refused = _call("token_logprobs", (ids, logprobs, ranks, logits, chosen), rows, vocab_size, num_top)
    if refused:
        raise IndexError(
            f"token_logprobs: {refused} chosen tokens are outside the vocabulary of {vocab_size}"
        )
    return ids, logprobs, ranks


# Token ids are 32-bit inside the kernels, with room for a vector past the last one.
_MAX_VOCAB_SIZE = 2**31 - 16


def _check_logits(op: str, logits: Tensor) -> None:
    if logits.dtype != torch.float32 or not logits.is_cpu:
        raise TypeError(
            f"{op}: logits must be float32 on the CPU; they are {_say(logits)} on {logits.device}"
        )
    if logits.dim() != 2 or not logits.is_contiguous() or not 0 < logits.shape[1] < _MAX_VOCAB_SIZE:
        raise ValueError(f"{op}: logits must be contiguous [N, V], V > 0; they are {_say(logits)}")


def _check_array(op: str, name: str, array: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if (
        array.dtype != dtype
        or array.shape != shape
        or not array.is_contiguous()
        or array.device.type != "cpu"
    ):
        raise ValueError(f"{op}: {name} must be contiguous {dtype} {list(shape)}; it is {_say(array)}")
