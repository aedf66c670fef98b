"""Root-mean-square and layer norms as functions on tensors, with every check."""

import torch
from torch import Tensor

from quire.kernels.cpu.calls import NOTHING, call, empty
from quire.kernels.cpu.checks import dtype_code, say
from quire.kernels.cpu.library import DTYPE_CODES


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    code = dtype_code("rms_norm", "x", x)
    weight_code = check_weight("rms_norm", "weight", x, weight)
    x, *layout = _rows(x)
    out = empty(x, *x.shape)
    call("rms_norm", (out, x, weight), *layout, x.shape[-1], eps, code, weight_code)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    code = dtype_code("fused_add_rms_norm", "x", x)
    weight_code = check_weight("fused_add_rms_norm", "weight", x, weight)
    x, residual = _alike("fused_add_rms_norm", x, residual)
    out, total, size = empty(x, *x.shape), empty(x, *x.shape), x.shape[-1]
    tensors = (out, total, x, residual, weight)
    call("fused_add_rms_norm", tensors, x.numel() // size, size, eps, code, weight_code)
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    code, weight_code = dtype_code("layer_norm", "x", x), _check_both("layer_norm", x, weight, bias)
    x, *layout = _rows(x)
    out = empty(x, *x.shape)
    tensors = (out, x, weight, NOTHING if bias is None else bias)
    call("layer_norm", tensors, *layout, x.shape[-1], eps, code, weight_code)
    return out


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    name = "fused_add_layer_norm"
    code, weight_code = dtype_code(name, "x", x), _check_both(name, x, weight, bias)
    x, residual = _alike(name, x, residual)
    out, total, size = empty(x, *x.shape), empty(x, *x.shape), x.shape[-1]
    tensors = (out, total, x, residual, weight, NOTHING if bias is None else bias)
    call(name, tensors, x.numel() // size, size, eps, code, weight_code)
    return out, total


def _alike(op: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Both, contiguous."""
    if residual.shape != x.shape or residual.dtype is not x.dtype or not residual.is_cpu:
        raise ValueError(f"{op}: residual is {say(residual)} but x is {say(x)}")
    return x.contiguous(), residual.contiguous()


def _check_both(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """The code of the dtype of weight and bias."""
    code = check_weight(op, "weight", x, weight)
    if bias is not None and check_weight(op, "bias", x, bias) != code:
        raise TypeError(f"{op}: bias must be {weight.dtype} as weight is; it is {bias.dtype}")
    return code


def check_weight(op: str, name: str, x: Tensor, weight: Tensor) -> int:
    """The code of the weight's dtype."""
    if weight.shape != x.shape[-1:] or not weight.numel() or not weight.is_contiguous() or not weight.is_cpu:
        raise ValueError(f"{op}: {name} must be contiguous of shape [{x.shape[-1]}]; it is {say(weight)}")
    if weight.dtype is not x.dtype and weight.dtype is not torch.float32:
        raise TypeError(f"{op}: {name} must be {x.dtype} or float32; it is {weight.dtype}")
    return DTYPE_CODES[weight.dtype]


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
