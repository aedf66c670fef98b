# SPDX-License-Identifier: Apache-2.0
"""Routing and expert kernels as Python functions on tensors, with every check."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.config.arch import Routing
from quire.kernels.cpu.calls import NOTHING, call, check_array, describe, dtype_code, empty
from quire.kernels.cpu.elementwise import ACTIVATIONS
from quire.kernels.cpu.linear import BLOCK_ROWS, SCRATCH, checked
from quire.kernels.cpu.low_rank import NativeStacks, native_stacks
from quire.kernels.experts import ExpertAdapters, ExpertWeights
from quire.kernels.linear import NativeWeight, PackedWeight

_SCORES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
_MOST_EXPERTS = 4096
"""Limit in csrc/cpu/route.cpp."""


class NativeExperts(NamedTuple):
    """Experts of a layer as arguments of the C++ kernel."""

    table: Tensor
    """int64 [E, 8]: addresses of data, scales, zeros and bias of gate and up, then of down."""
    sizes: tuple[int, int, int, int, int]
    """Experts on this rank, the number of the first, experts in the layer, hidden size and intermediate size."""
    formats: tuple[int, ...]
    """Values of k per scale, types of scales and zeros, fast flag and format, of each of both weights."""
    row_floats: int
    """Floats in a row of packed activations."""


class NativeAdapters(NamedTuple):
    """Adapters of a layer's experts as arguments of the C++ kernel."""

    table: Tensor
    """int64 [2, 14]: tables of `NativeStacks` of gate and up, and of down."""
    up: NativeStacks
    down: NativeStacks
    raw: int
    """Outputs of gate and up, or of up alone."""

    def scratch(self, rows: int) -> int:
        """Return the adapters' share of scratch memory, in floats."""
        return rows * self.raw + max(self.up.scratch(rows), self.down.scratch(rows))


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    code = dtype_code("route", "logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"route: logits must be [T, E]; they are {describe(logits)}")
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


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    check_array("experts", "weights", weights, torch.float32, tuple(chosen.shape))
    out = _run("experts", x, chosen, weights, of, adapter_rows, adapters)
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def expert_rows(
    x: Tensor,
    chosen: Tensor,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    return _run("expert_rows", x, chosen, None, of, adapter_rows, adapters)


def add_choices(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    if rows.dim() != 3:
        raise ValueError(f"add_choices: rows must be [T, k, H]; they are {describe(rows)}")
    tokens, top_k, hidden = rows.shape
    check_array("add_choices", "rows", rows, torch.float32, (tokens, top_k, hidden))
    check_array("add_choices", "chosen", chosen, torch.int32, (tokens, top_k))
    check_array("add_choices", "weights", weights, torch.float32, (tokens, top_k))
    out = empty(rows, tokens, hidden)
    call("add_choices", (out, rows, chosen, weights), tokens, top_k, hidden)
    return out


def _run(
    op: str,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return the weighted sums of choices, or their summands if there are no weights."""
    dtype_code(op, "x", x)
    native: NativeExperts = of.native or _checked(of)
    count, _, total, hidden, inner = native.sizes
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"{op}: x must be [T, {hidden}]; it is {describe(x)}")
    tokens, top_k = len(x), chosen.shape[-1] if chosen.dim() else 0
    check_array(op, "chosen", chosen, torch.int32, (tokens, top_k))
    wide = x.float().contiguous()
    out = empty(wide, tokens, hidden) if weights is not None else empty(wide, tokens, top_k, hidden)
    rows = min(tokens * top_k, BLOCK_ROWS)
    floats = rows * (native.row_floats + inner + hidden) + tokens * top_k + count
    own_rows = own_table = NOTHING
    if adapters is not None and adapter_rows is not None:
        check_array("experts", "adapter_rows", adapter_rows, torch.int32, (tokens,))
        own = adapters.native or _checked_adapters(adapters, native, of.halves)
        floats, own_rows, own_table = floats + own.scratch(rows), adapter_rows, own.table
    scratch = SCRATCH.of(floats)
    sizes = (tokens, top_k, *native.sizes, ACTIVATIONS[of.activation], *native.formats)
    tensors = (
        out,
        wide,
        chosen,
        NOTHING if weights is None else weights,
        native.table,
        own_rows,
        own_table,
        scratch,
    )
    refused = call("experts", tensors, scratch.nbytes, *sizes)
    if refused:
        limit = "" if adapters is None else f", and the adapters, {len(adapters.down.a) // count},"
        raise IndexError(f"{op}: {refused} choices are outside the {total} experts{limit}")
    return out


def _checked_adapters(adapters: ExpertAdapters, of: NativeExperts, halves: int) -> NativeAdapters:
    """Check adapters once and return their kernel arguments, as `_checked` does for weights."""
    count, _, _, hidden, inner = of.sizes
    up, down = (native_stacks("experts", stacks) for stacks in (adapters.gate_up, adapters.down))
    sizes = (up.slots, up.inputs, up.outputs, down.inputs, down.outputs)
    if sizes != (down.slots, hidden, halves * inner, inner, hidden) or up.slots % count:
        raise ValueError(
            f"experts: adapters {sizes} are not of {count} experts with {inner} features of {hidden}"
        )
    table = torch.from_numpy(np.concatenate((up.table.numpy(), down.table.numpy())))
    native = NativeAdapters(table, up, down, halves * inner)
    object.__setattr__(adapters, "native", native)
    return native


def _check_routing(routing: Routing, count: int) -> None:
    of_groups = count // routing.groups * routing.top_groups
    good = 0 < routing.top_groups <= routing.groups and count % routing.groups == 0
    if not good or not 0 < routing.top_k <= of_groups or count > _MOST_EXPERTS:
        raise ValueError(
            f"route: {count} experts, at most {_MOST_EXPERTS}, cannot be chosen from by {routing}"
        )


def _checked(of: ExpertWeights) -> NativeExperts:
    """Check weights and return their kernel arguments, kept on `of`: weights never change."""
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
    sizes = (len(of), of.first, of.num_in_layer, hidden, inner)
    native = NativeExperts(table, sizes, formats, max(up.padded, down.padded) + 1)
    object.__setattr__(of, "native", native)
    return native


def _alike(name: str, matrices: tuple[PackedWeight, ...], count: int) -> NativeWeight:
    """Return the kernel arguments of the weights, which must have the same sizes and format."""
    natives = [matrix.native or checked("experts", matrix) for matrix in matrices]
    if len(natives) != count or any(
        (each.sizes, each.format) != (natives[0].sizes, natives[0].format) for each in natives
    ):
        raise ValueError(f"experts: {name} must be {count} matrices of one shape and format")
    return natives[0]


def _addresses(
    name: str, matrices: tuple[PackedWeight, ...], biases: tuple[Tensor, ...], outputs: int
) -> list[list[int]]:
    """Return the addresses of data, scales, zeros and biases, each for all experts; 0 where there is none."""
    for bias in biases:
        check_array("experts", f"{name}_bias", bias, torch.float32, (outputs,))
    parts = [matrix.native.tensors for matrix in matrices if matrix.native is not None]
    columns = [list(column) for column in zip(*parts, strict=True)]
    columns.append(list(biases) or [NOTHING] * len(matrices))
    for tensor in (tensor for column in columns for tensor in column):
        if tensor.data_ptr() % tensor.itemsize:
            raise ValueError(f"experts: {name} is not aligned to its elements")
    return [[tensor.data_ptr() for tensor in column] for column in columns]
