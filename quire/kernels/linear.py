# SPDX-License-Identifier: Apache-2.0
"""Packed weights and quantized activations: the layouts that the linear kernels read, and conversions.

Invariant: a weight is packed once, while loading, and exists once. On a CPU, panels of 16 outputs let a kernel
vectorize over outputs and process k in order, so that no sum depends on how many rows are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowQuantization:
    """Quantize-dequantize of activation rows, with a scale per `group` inputs of a row (0: all); see
    `ops.round_rows`."""

    codes: Literal["int8", "e4m3"]
    group: int = 0
    lowest: int = -128
    """Least integer code."""
    symmetric: bool = True
    """True if a dynamic scale has no zero point."""
    bound: float | None = None
    """Upper bound of the magnitudes that determine a dynamic scale."""
    scale: float | None = None
    """Static scale; None: dynamic."""
    zero: float = 0.0
    """Zero point of a static `scale`."""

    @property
    def makes_bytes(self) -> bool:
        """True if a row becomes 8-bit integers with one scale and one zero point."""
        return self.codes == "int8" and not self.group

    @property
    def shifts(self) -> bool:
        """True if there may be a nonzero zero point."""
        return not self.symmetric if self.scale is None else self.zero != 0.0


PANEL = 16
"""Outputs per panel."""
PAIR = 2
"""Values of k stored together in a panel of bfloat16."""
QUAD = 4
"""Values of k stored together in a panel of integers."""
CHUNK = 64
"""Values of k whose activations share a scale in the fast mode; panels of integers hold whole chunks."""
SPAN = 32
"""The same by int8 and int6 weights with a scale or a zero point per group."""
INT8_ZERO = 128
"""Offset of an int8 weight's stored byte."""

Layout = Literal["panels", "rows"]


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Stored format of a weight.

    "float": as it is. "int8", "int6" and "int4": a scale, and without `symmetric` a zero point or a minimum, per output
    and `group_size` values of k; 0: one for all of an output. "fp8" (E4M3, on GPUs): a scale per output or,
    `per_tensor`, one for all; with `fast` activations are quantized to E4M3 too, with a scale per token. int4 that is
    not `symmetric` is quantized to scales and minimums in blocks (`formats.base`) if `two_level`.

    On CPUs with `fast`, integers are multiplied with activations quantized to 8 bits, with a scale per token and 64 or
    32 values of k (see `ops.packed_linear`), and bfloat16 with activations rounded to bfloat16; otherwise weights are
    widened and activations stay float32. `vendor` and `invariant` are for GPUs: fp8 matmuls may use the vendor's
    library; a row's results have the same bits in every batch, which on a CPU is always so.
    """

    kind: str = "float"
    group_size: int = 0
    symmetric: bool = True
    fast: bool = True
    per_tensor: bool = False
    vendor: bool = True
    invariant: bool = False
    two_level: bool = False

    @property
    def is_plain_int8(self) -> bool:
        """True if each output's k are 8-bit integers times one scale."""
        return self.kind == "int8" and not self.group_size and self.symmetric


FLOAT = WeightScheme(fast=False)

GatedActivation = Literal["silu_and_mul", "clamped_swiglu"]
"""Activations that a matmul with a weight in two halves, gate and up, can fuse."""
Function = Literal["relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"]
"""Elementwise activation: "relu2" is ReLU squared (So et al., 2021, arXiv:2109.08668), and "gelu_tanh" GELU's
approximation through tanh.
"""
FusedActivation = GatedActivation | Function
"""Activation that a matmul can fuse."""
GATED: tuple[FusedActivation, ...] = ("silu_and_mul", "clamped_swiglu")
"""Activations that compute one output from two."""


class NativeWeight(NamedTuple):
    """Packed weight as passed to the C++ kernels."""

    tensors: tuple[Tensor, Tensor, Tensor]
    """Data, scales and zeros; absent ones are empty."""
    sizes: tuple[int, int, int, int, int, int]
    """Outputs, inputs, halves, values of k that share a scale, and the codes of the types of scales and zeros."""
    format: tuple[int, int]
    """Fast flag, and the code of the format."""
    padded: int
    """Number of inputs including padding."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight [N, K] in panels; rows beyond N and k beyond K are 0.

    `halves` is 2 if the panels of the first and second half of N alternate (gate and up), else 1. With P panels and G
    groups, `data` is [P, K, 16] for floats, but for bfloat16 [P, K / 2, 16, 2], the second of two k first; uint8
    [P, K / 4, 16, 4] of 8-bit codes, those of int8 with zero point 128; uint8 [P, K / 8, 16, 4] of 4-bit codes, the
    first four of eight k in the low nibbles and the others in the high ones; and uint8 [P, K / 16, 3, 16, 4] of 6-bit
    codes, with zero point 32 (`formats.integers`). K is padded, for codes to whole chunks and
    groups. `scales` and `zeros` are [P, G, 16]: scales in float32, bfloat16 or float16; zeros in uint8, which are zero
    points, or floats, which are minimums; or either as blocks (`formats.base`). Without `zeros` int4's zero point is
    8.

    That is the CPU layout, "panels". In the GPU layout, "rows", outputs are separate: floats [N, K]; int8 or E4M3 [N,
    K] with scales [N], or of groups [N, G]; 4-bit codes int32 [N, K / 8], K padded to a multiple of 256
    (`formats.grouped`), with scales and zeros [G, N].
    """

    scheme: WeightScheme
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    outputs: int
    inputs: int
    halves: int = 1
    layout: Layout = "panels"
    code_sums: Tensor | None = None
    """float32 [P, 16], for plain int8 whose activations have zero points: the sum of each output's integers."""
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """Kernels' own form, set on first use: `NativeWeight`, or a GPU's arrival counters of split-k parts."""

    @staticmethod
    def of(
        scheme: WeightScheme, shape: tuple[int, ...], halves: int, tensors: dict[str, Tensor]
    ) -> PackedWeight:
        """Return the weight with this scheme and shape [N, K], from its `tensors()`."""
        outputs, inputs = shape
        missing: dict[str, Any] = {"scales": None, "zeros": None}
        return PackedWeight(
            scheme=scheme, outputs=outputs, inputs=inputs, halves=halves, **(missing | tensors)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by field name, without the kernels' own."""
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.init}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def with_code_sums(self) -> PackedWeight:
        """Return the same weight, plain int8 in panels, with `code_sums`."""
        codes = self.data.transpose(1, 2).flatten(2)[..., : self.inputs]
        sums = codes.sum(-1, dtype=torch.int64) - INT8_ZERO * self.inputs
        return replace(self, code_sums=sums.float())

    def narrowed(self, inputs: slice) -> PackedWeight:
        """Return the weight of these inputs: int8 of whole chunks, or fp8 with scales for all k of an output."""
        step = QUAD if self.layout == "panels" else 1
        data = self.data[:, inputs.start // step : inputs.stop // step].contiguous()
        return replace(self, data=data, inputs=inputs.stop - inputs.start, code_sums=None)

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedWeight:
        """Return the same weight with `move` applied to its tensors."""
        moved: dict[str, Any] = {name: move(part) for name, part in self.tensors().items()}
        return replace(self, **moved)

    def with_float32_scales(self) -> PackedWeight:
        """Return the weight with float32 scales, which hold those of any other type."""
        assert self.scales is not None, "a weight with scales"
        return replace(self, scales=self.scales.float())

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return sum(part.nbytes for part in self.tensors().values())


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """fp8 activations [T, K]: `values` in E4M3 and float32 `scales` [T, 1].

    `dtype` is that of the original activations, and of matmul results.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[T, K]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    def float(self) -> Tensor:
        """Return the dequantized activations in float32."""
        return self.values.float() * self.scales


def num_panels(outputs: int, halves: int) -> int:
    """Return the number of panels of a weight; each half begins with a panel of its own."""
    return -(-(outputs // halves) // PANEL) * halves


def to_panels(rows: Tensor, halves: int) -> Tensor:
    """Convert [N, ...] -> [P, 16, ...], padded with zeros."""
    parts = []
    for half in rows.chunk(halves):
        padding = -len(half) % PANEL
        parts.append(
            torch.cat([half, half.new_zeros(padding, *half.shape[1:])]).view(-1, PANEL, *half.shape[1:])
        )
    return torch.stack(parts, 1).flatten(0, 1)


def from_panels(panels: Tensor, outputs: int, halves: int) -> Tensor:
    """Convert [P, 16, ...] -> [N, ...]."""
    parts = torch.unflatten(panels, 0, (-1, halves)).unbind(1)
    return torch.cat([part.flatten(0, 1)[: outputs // halves] for part in parts])
