# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters as a function on tensors, with all checks."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.calls import call, check_array, check_on_cpu, describe, dtype_code
from quire.kernels.cpu.library import CACHE_DTYPE_CODES
from quire.kernels.cpu.linear import SCRATCH
from quire.kernels.low_rank import LowRankStacks


class NativeStacks(NamedTuple):
    """Slots as passed to the C++ kernels."""

    table: Tensor
    """int64 [14]: addresses of their tensors, in the order of `LowRankStacks`, then the sizes and the code of the
    dtype.
    """
    slots: int
    inputs: int
    outputs: int
    row_floats: int
    """Floats of scratch memory per row."""

    def scratch(self, rows: int) -> int:
        """Return the floats of scratch memory for all rows, as `Stacks::scratch` in csrc/cpu."""
        return rows * self.row_floats + self.slots + 1


def low_rank_linear(out: Tensor, x: Tensor, adapter_rows: Tensor, adapters: LowRankStacks) -> None:
    dtype_code("low_rank_linear", "x", x)
    native = native_stacks("low_rank_linear", adapters)
    if x.dim() != 2 or x.shape[1] != native.inputs:
        raise ValueError(f"low_rank_linear: x must be [T, {native.inputs}]; it is {describe(x)}")
    rows = len(x)
    check_array("low_rank_linear", "out", out, torch.float32, (rows, native.outputs))
    check_array("low_rank_linear", "adapter_rows", adapter_rows, torch.int32, (rows,))
    scratch = SCRATCH.of(native.scratch(rows))
    tensors = (out, x.float().contiguous(), adapter_rows, native.table, scratch)
    refused = call("low_rank_linear", tensors, scratch.nbytes, rows)
    if refused:
        raise IndexError(
            f"low_rank_linear: the adapters of {refused} rows are outside the {native.slots} slots"
        )


def native_stacks(op: str, adapters: LowRankStacks) -> NativeStacks:
    """Return the slots' arguments, checked once: shapes and addresses never change."""
    if adapters.native is None:
        object.__setattr__(adapters, "native", _checked(op, adapters))
    native: NativeStacks = adapters.native
    return native


def _checked(op: str, adapters: LowRankStacks) -> NativeStacks:
    a, b = adapters.a, adapters.b
    check_on_cpu(op, "a", a)
    if a.dtype not in CACHE_DTYPE_CODES:
        raise TypeError(f"{op}: a must be float32, bfloat16, float16 or int8, but is {a.dtype}")
    if a.dim() != 4 or b.dim() != 3:
        raise ValueError(
            f"{op}: a must be [S, P, K, R] and b [S, R, N]; they are {describe(a)} and {describe(b)}"
        )
    (slots, parts, inputs, most), outputs = a.shape, b.shape[-1]
    check_array(op, "a", a, a.dtype, (slots, parts, inputs, most))
    check_array(op, "b", b, a.dtype, (slots, most, outputs))
    check_array(op, "scales", adapters.scales, torch.float32, (slots, parts, most))
    check_array(op, "ranks", adapters.ranks, torch.int32, (slots, parts))
    check_array(op, "affine", adapters.affine, torch.int32, (slots, parts))
    check_array(op, "factors", adapters.factors, torch.float32, (slots, outputs))
    check_array(op, "offsets", adapters.offsets, torch.float32, (slots, outputs))
    check_array(op, "ends", adapters.ends, torch.int64, (parts + 1,))
    ends = adapters.ends.tolist()
    if ends != sorted(ends) or (ends[0], ends[-1]) != (0, outputs):
        raise ValueError(f"{op}: ends must go from 0 to {outputs}; they are {ends}")
    tensors = {
        "a": a,
        "b": b,
        "scales": adapters.scales,
        "ranks": adapters.ranks,
        "affine": adapters.affine,
        "factors": adapters.factors,
        "offsets": adapters.offsets,
        "ends": adapters.ends,
    }
    for name, tensor in tensors.items():
        if tensor.data_ptr() % tensor.itemsize:
            shape = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{op}: {name}, {shape}, must begin at a multiple of {tensor.itemsize} bytes")
    places = [tensor.data_ptr() for tensor in tensors.values()]
    sizes = [slots, parts, inputs, outputs, most, CACHE_DTYPE_CODES[a.dtype]]
    table = torch.from_numpy(np.array(places + sizes, dtype=np.int64))
    return NativeStacks(table, slots, inputs, outputs, parts * most + 2)
