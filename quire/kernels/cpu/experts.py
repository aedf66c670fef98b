"""Routing and experts as functions on tensors, with every check."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.config.arch import Routing
from quire.kernels.cpu.calls import NOTHING, call, empty
from quire.kernels.cpu.checks import check_array, dtype_code, say
from quire.kernels.cpu.linear import ACTIVATIONS, BLOCK_ROWS, SCRATCH, checked
from quire.kernels.experts import ExpertWeights
from quire.kernels.linear import Native, PackedWeight

_SCORES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
_MOST_EXPERTS = 4096
"""As in csrc/cpu/route.cpp."""


class NativeExperts(NamedTuple):
    """The experts of a layer as the C++ kernel is told of them."""

    table: Tensor
    """int64 [E, 8]: where data, scales, zeros and bias of gate and up lie, and those of down."""
    sizes: tuple[int, int, int]
    """Experts, hidden size and intermediate size."""
    formats: tuple[int, ...]
    """Of both matrices: values of k that share a scale, the types of scales and zeros, whether fast, and the format."""
    row_floats: int
    """What a row of packed activations takes."""


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    code = dtype_code("route", "logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"route: logits must be [T, E]; they are {say(logits)}")
    rows, count = logits.shape
    _check_routing(routing, count)
    if bias is not None:
        check_array("route", "bias", bias, torch.float32, (count,))
    logits = logits.contiguous()
    chosen = empty(logits, rows, routing.top_k, dtype=torch.int32)
    weights = empty(logits, rows, routing.top_k, dtype=torch.float32)
    call(
        "route",
        (chosen, weights, logits, NOTHING if bias is None else bias),
        *(rows, count, routing.top_k, _SCORES[routing.scores]),
        *(routing.groups, routing.top_groups, routing.group_members, int(routing.normalized)),
        *(routing.scale, routing.reach, code),
    )
    return chosen, weights


def experts(x: Tensor, chosen: Tensor, weights: Tensor, of: ExpertWeights) -> Tensor:
    dtype_code("experts", "x", x)
    native: NativeExperts = of.native or _checked(of)
    count, hidden, inner = native.sizes
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"experts: x must be [T, {hidden}]; it is {say(x)}")
    tokens, top_k = len(x), chosen.shape[-1] if chosen.dim() else 0
    check_array("experts", "chosen", chosen, torch.int32, (tokens, top_k))
    check_array("experts", "weights", weights, torch.float32, (tokens, top_k))
    wide = x.float().contiguous()
    out = empty(wide, tokens, hidden)
    rows = min(tokens * top_k, BLOCK_ROWS)
    scratch = SCRATCH.of(rows * (native.row_floats + inner + hidden) + tokens * top_k + count)
    sizes = (tokens, top_k, *native.sizes, ACTIVATIONS[of.activation], *native.formats)
    refused = call("experts", (out, wide, chosen, weights, native.table, scratch), scratch.nbytes, *sizes)
    if refused:
        raise IndexError(f"experts: {refused} choices are outside the {count} experts")
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def _check_routing(routing: Routing, count: int) -> None:
    of_groups = count // routing.groups * routing.top_groups
    good = 0 < routing.top_groups <= routing.groups and count % routing.groups == 0
    if not good or not 0 < routing.top_k <= of_groups or count > _MOST_EXPERTS:
        raise ValueError(
            f"route: {count} experts, at most {_MOST_EXPERTS}, cannot be chosen from by {routing}"
        )


def _checked(of: ExpertWeights) -> NativeExperts:
    """What the kernel is told: weights never change, so they are checked once."""
    up, down = _alike("gate_up", of.gate_up, len(of)), _alike("down", of.down, len(of))
    (outputs, hidden, halves, *up_groups), (down_outputs, inner, _, *down_groups) = up.sizes, down.sizes
    if halves != of.halves or outputs != halves * inner or down_outputs != hidden:
        raise ValueError(
            f"experts: gate_up [{outputs}, {hidden}] in {halves} halves, down [{down_outputs}, {inner}]"
        )
    columns = (
        *_addresses("gate_up", of.gate_up, of.gate_up_bias, outputs),
        *_addresses("down", of.down, of.down_bias, hidden),
    )
    table = torch.from_numpy(np.array(columns, dtype=np.int64).T.copy())
    formats = (*up_groups, *up.format, *down_groups, *down.format)
    native = NativeExperts(table, (len(of), hidden, inner), formats, max(up.padded, down.padded) + 1)
    object.__setattr__(of, "native", native)
    return native


def _alike(name: str, matrices: tuple[PackedWeight, ...], count: int) -> Native:
    """What the kernels are told of each of them, which must be the same."""
    told = [matrix.native or checked("experts", matrix) for matrix in matrices]
    if len(told) != count or any(
        (each.sizes, each.format) != (told[0].sizes, told[0].format) for each in told
    ):
        raise ValueError(f"experts: {name} must be {count} matrices of one shape and format")
    return told[0]


def _addresses(
    name: str, matrices: tuple[PackedWeight, ...], biases: tuple[Tensor, ...], outputs: int
) -> list[list[int]]:
    """Of data, scales, zeros and biases, each of all experts; 0 where there is none."""
    for bias in biases:
        check_array("experts", f"{name}_bias", bias, torch.float32, (outputs,))
    parts = [matrix.native.tensors for matrix in matrices if matrix.native is not None]
    columns = [list(column) for column in zip(*parts, strict=True)]
    columns.append(list(biases) or [NOTHING] * len(matrices))
    for tensor in (tensor for column in columns for tensor in column):
        if tensor.data_ptr() % tensor.itemsize:
            raise ValueError(f"experts: {name} is not aligned to its elements")
    return [[tensor.data_ptr() for tensor in column] for column in columns]
