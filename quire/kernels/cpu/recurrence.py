"""Recurrences over tokens as functions on tensors, with every check."""

import torch
from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata
from quire.kernels.cpu.calls import call, empty
from quire.kernels.cpu.checks import check_array, dtype_code, say
from quire.kernels.cpu.states import bad_request, check_states

_GATES = 4
"""Numbers that a token has of its own for each value head, beside decays; as in csrc/cpu/gated_delta.cpp."""


def gated_delta(
    qkv: Tensor,
    ba: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    strongest: float = 1.0,
    least: float | None = None,
) -> Tensor:
    dtype_code("gated_delta", "qkv", qkv)
    if states.dim() != 4 or qkv.dim() != 2:
        raise ValueError(
            f"gated_delta: qkv must be [T, N] and states [blocks, Hv, Dk, Dv]; they are {say(qkv)}, {say(states)}"
        )
    _, value_heads, keys, values = states.shape
    rows, width = qkv.shape
    key_heads, rest = divmod(width - value_heads * values, 2 * keys)
    if rest or key_heads < 1 or value_heads % key_heads:
        raise ValueError(f"gated_delta: qkv is {say(qkv)} and does not fit states {list(states.shape)}")
    steps = keys if dt_bias.numel() == value_heads * keys else 1
    check_array("gated_delta", "ba", ba, qkv.dtype, (rows, value_heads * (1 + steps)))
    check_array("gated_delta", "rates", rates, torch.float32, (value_heads,))
    check_array("gated_delta", "dt_bias", dt_bias, torch.float32, (value_heads * steps,))
    step = check_states("gated_delta", states, (value_heads, keys, values), rows, metadata)
    wide, ba = qkv.float().contiguous(), ba.float()
    out = empty(wide, rows, value_heads, values)
    gates, decays = empty(wide, rows, value_heads, _GATES), empty(wide, rows, value_heads, steps)
    tensors = (out, wide, ba, rates, dt_bias, states, gates, decays, *step.tensors)
    sizes = (key_heads, value_heads, keys, values, steps)
    refused = call("gated_delta", tensors, *step.sizes, step.stride, *sizes, strongest, least or 0.0)
    if refused:
        raise IndexError(bad_request("gated_delta", metadata, refused - 1, len(states)))
    return out.to(qkv.dtype)


def rg_lru(
    x: Tensor, weights: Tensor, bias: Tensor, rates: Tensor, states: Tensor, metadata: StateMetadata
) -> Tensor:
    dtype_code("rg_lru", "x", x)
    if weights.dim() != 3 or x.dim() != 2:
        raise ValueError(
            f"rg_lru: x must be [T, h * D], weights [h, D, 2 * D]; they are {say(x)}, {say(weights)}"
        )
    heads, size, _ = weights.shape
    check_array("rg_lru", "weights", weights, torch.float32, (heads, size, 2 * size))
    check_array("rg_lru", "bias", bias, torch.float32, (heads, 2 * size))
    check_array("rg_lru", "rates", rates, torch.float32, (heads * size,))
    rows = len(x)
    wide = x.float().contiguous()
    check_array("rg_lru", "x", wide, torch.float32, (rows, heads * size))
    step = check_states("rg_lru", states, (heads * size,), rows, metadata)
    out, gates = empty(wide, rows, heads * size), empty(wide, rows, heads, 2 * size)
    tensors = (out, wide, weights, bias, rates, states, gates, *step.tensors)
    refused = call("rg_lru", tensors, *step.sizes, step.stride, heads, size)
    if refused:
        raise IndexError(bad_request("rg_lru", metadata, refused - 1, len(states)))
    return out.to(x.dtype)


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
    dtype_code("rwkv7", "r", r)
    if states.dim() != 4 or r.dim() != 2:
        raise ValueError(
            f"rwkv7: r must be [T, h * D] and states [blocks, h, D, D]; they are {say(r)}, {say(states)}"
        )
    rows, (heads, size) = len(r), states.shape[1:3]
    named = {"r": r, "w": w, "k": k, "v": v, "a": a}
    for name, tensor in named.items():
        if tensor.dtype != r.dtype or tensor.shape != (rows, heads * size) or not tensor.is_cpu:
            raise ValueError(f"rwkv7: {name} must be {r.dtype} [{rows}, {heads * size}]; it is {say(tensor)}")
    check_array("rwkv7", "of_heads", of_heads, torch.float32, (5, heads * size))
    step = check_states("rwkv7", states, (heads, size, size), rows, metadata)
    wide = [tensor.float().contiguous() for tensor in named.values()]
    out, scratch = empty(wide[0], rows, heads * size), empty(wide[0], 4, rows, heads * size)
    tensors = (out, *wide, of_heads, states, scratch, *step.tensors)
    refused = call("rwkv7", tensors, *step.sizes, step.stride, heads, size, eps)
    if refused:
        raise IndexError(bad_request("rwkv7", metadata, refused - 1, len(states)))
    return out.to(r.dtype)
