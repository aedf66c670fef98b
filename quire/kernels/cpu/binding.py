"""The C++ kernels as Python functions on tensors, with every check of device, dtype, shape and layout.

Invariant: no address reaches C++ before the tensor behind it was checked, and the tensor outlives the call.
"""

import torch
from torch import Tensor

from quire.kernels.cpu import library


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check("rms_norm", x=x, weight=weight)
    _check_weight("rms_norm", x, weight)
    x, outer, inner, outer_stride, inner_stride = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    args = (outer, inner, outer_stride, inner_stride, x.shape[-1], eps)
    _call("rms_norm", (out, x, weight), *args, _code(x), _code(weight))
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check("fused_add_rms_norm", x=x, residual=residual, weight=weight)
    _check_weight("fused_add_rms_norm", x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"fused_add_rms_norm: residual is {_say(residual)} but x is {_say(x)}")
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // weight.shape[0]
    args = (rows, x.shape[-1], eps, _code(x), _code(weight))
    _call("fused_add_rms_norm", (out, total, x, residual, weight), *args)
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    _check("silu_and_mul", x=x)
    if x.shape[-1] % 2 or not x.shape[-1]:
        raise ValueError(f"silu_and_mul: the last dimension must be even and positive; x is {_say(x)}")
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    _call("silu_and_mul", (out, x), out.numel() // size, size, _code(x))
    return out


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    _check("rotary_embedding", q=q, k=k, cos_sin_cache=cos_sin_cache)
    _check_rotary(positions, q, k, cos_sin_cache)
    num_positions, rot_dim = cos_sin_cache.shape
    heads = (q.shape[1], q.stride(0), q.stride(1), k.shape[1], k.stride(0), k.stride(1))
    args = (q.shape[0], num_positions, rot_dim, *heads, int(interleaved), _code(q))
    refused = _call("rotary_embedding", (q, k, positions, cos_sin_cache), *args)
    if refused:
        raise IndexError(
            f"rotary_embedding: {refused} positions are outside the cache of {num_positions} positions"
        )
    return q, k


def _call(name: str, tensors: tuple[Tensor, ...], *args: float) -> int:
    kernels = library.loaded()
    assert kernels is not None, "the table of ops asks supports() before it loads a kernel"
    status = kernels.kernels[name](*[tensor.data_ptr() for tensor in tensors], *args)
    if status < 0:
        raise RuntimeError(f"{name}: the kernel library does not know a dtype code: reinstall quire")
    return status


def _code(tensor: Tensor) -> int:
    return library.DTYPE_CODES[tensor.dtype]


def _rows(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """x as rows that two strides give: (x, outer, inner, outer stride, inner stride); a copy if need be."""
    if x.dim() == 3 and x.stride(-1) == 1:
        return x, x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2 and x.stride(-1) == 1:
        return x, x.shape[0], 1, x.stride(0), 0
    x = x.contiguous()
    return x, x.numel() // x.shape[-1], 1, x.shape[-1], 0


def _check(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_cpu:
            raise ValueError(f"{op}: {name} must be on the CPU, but is on {tensor.device}")
        if tensor.dtype not in library.DTYPE_CODES:
            raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, but is {tensor.dtype}")


def _check_weight(op: str, x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:] or not weight.numel() or not weight.is_contiguous():
        raise ValueError(f"{op}: weight must be contiguous of shape [{x.shape[-1]}]; it is {_say(weight)}")
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{op}: weight must be {x.dtype} or float32; it is {weight.dtype}")


def _check_rotary(positions: Tensor, q: Tensor, k: Tensor, cache: Tensor) -> None:
    if positions.dtype != torch.int64 or positions.shape != q.shape[:1] or not positions.is_contiguous():
        raise ValueError(f"rotary_embedding: positions must be int64 [{q.shape[0]}]; it is {_say(positions)}")
    if cache.dtype != torch.float32 or cache.dim() != 2 or cache.shape[1] % 2 or not cache.is_contiguous():
        raise ValueError(f"rotary_embedding: cos_sin_cache must be float32 [P, even]; it is {_say(cache)}")
    for name, heads in (("q", q), ("k", k)):
        if heads.dim() != 3 or heads.shape[0] != q.shape[0] or heads.shape[2] < cache.shape[1]:
            shape = f"[{q.shape[0]}, heads, >= {cache.shape[1]}]"
            raise ValueError(f"rotary_embedding: {name} must be {shape}; it is {_say(heads)}")
        if heads.stride(2) != 1 or heads.dtype != q.dtype:
            raise ValueError(
                f"rotary_embedding: {name} must be {q.dtype} with stride 1 in its last dimension"
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
