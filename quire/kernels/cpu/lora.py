"""Low-rank adapters as a function on tensors, with every check."""

import torch
from torch import Tensor

from quire.kernels.cpu.calls import call, empty
from quire.kernels.cpu.checks import check_array, dtype_code, say
from quire.kernels.cpu.library import DTYPE_CODES
from quire.kernels.lora import LoraStacks


def lora_linear(out: Tensor, x: Tensor, adapter_rows: Tensor, adapters: LoraStacks) -> None:
    dtype_code("lora_linear", "x", x)
    slots, parts, inputs, most, outputs = _checked(adapters)
    if x.dim() != 2 or x.shape[1] != inputs:
        raise ValueError(f"lora_linear: x must be [T, {inputs}]; it is {say(x)}")
    rows = len(x)
    check_array("lora_linear", "out", out, torch.float32, (rows, outputs))
    check_array("lora_linear", "adapter_rows", adapter_rows, torch.int32, (rows,))
    wide = x.float().contiguous()
    shrunk = empty(wide, rows, parts, most)
    weights = (adapters.a, adapters.b, adapters.scales, adapters.ranks)
    affine = (adapters.affine, adapters.factors, adapters.offsets)
    sizes = (rows, slots, parts, inputs, outputs, most, DTYPE_CODES[adapters.a.dtype])
    tensors = (out, wide, adapter_rows, *weights, *affine, adapters.ends, shrunk)
    refused = call("lora_linear", tensors, *sizes)
    if refused:
        raise IndexError(f"lora_linear: the adapters of {refused} rows are outside the {slots} slots")


def _checked(adapters: LoraStacks) -> tuple[int, int, int, int, int]:
    """Slots, parts, inputs, ranks and outputs: shapes and places never change, so they are checked once."""
    if adapters.native is not None:
        return adapters.native
    a, b = adapters.a, adapters.b
    dtype_code("lora_linear", "a", a)
    if a.dim() != 4 or b.dim() != 3:
        raise ValueError(
            f"lora_linear: a must be [S, P, K, R] and b [S, R, N]; they are {say(a)} and {say(b)}"
        )
    (slots, parts, inputs, most), outputs = a.shape, b.shape[-1]
    check_array("lora_linear", "a", a, a.dtype, (slots, parts, inputs, most))
    check_array("lora_linear", "b", b, a.dtype, (slots, most, outputs))
    check_array("lora_linear", "scales", adapters.scales, torch.float32, (slots, parts))
    check_array("lora_linear", "ranks", adapters.ranks, torch.int32, (slots, parts))
    check_array("lora_linear", "affine", adapters.affine, torch.int32, (slots, parts))
    check_array("lora_linear", "factors", adapters.factors, torch.float32, (slots, outputs))
    check_array("lora_linear", "offsets", adapters.offsets, torch.float32, (slots, outputs))
    check_array("lora_linear", "ends", adapters.ends, torch.int64, (parts + 1,))
    ends = adapters.ends.tolist()
    if ends != sorted(ends) or (ends[0], ends[-1]) != (0, outputs):
        raise ValueError(f"lora_linear: ends must go from 0 to {outputs}; they are {ends}")
    sizes = slots, parts, inputs, most, outputs
    object.__setattr__(adapters, "native", sizes)
    return sizes
