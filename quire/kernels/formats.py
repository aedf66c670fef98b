"""The formats in which weights are kept, an object each: how they are rounded, how they lie, what they stand for.

A kind of `WeightScheme` is a row of `FORMATS`; the kernels of a device have a table of the kinds that they multiply. A
new format says here what its numbers are, in panels, in rows or in both, and is then packed, checked and unpacked.

Invariant: `quantized` alone rounds, and both layouts hold what it makes: a weight has the same numbers on every device.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.linear import (
    CHUNK,
    INT8_ZERO,
    PAIR,
    PANEL,
    QUAD,
    Layout,
    PackedWeight,
    WeightScheme,
    from_panels,
    num_panels,
    to_panels,
)

GROUP_SIZES = (32, 64, 128)
"""Values of k that may share a scale of int4."""
FP8_MAX = 448.0
"""The largest E4M3 number."""
FLOAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the C++ kernels call float types: `enum DType` of csrc/cpu/quire_cpu.h."""
_INT4_ZERO = 8


class Numbers(NamedTuple):
    """A matrix as a format keeps it: its numbers, and what they are scaled and shifted by."""

    data: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None


class Part(NamedTuple):
    """A tensor of `Numbers` in panels."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Format:
    """Base of all formats."""

    kind: ClassVar[str]
    layouts: ClassVar[tuple[Layout, ...]] = ("panels", "rows")

    def code(self, dtype: torch.dtype) -> int:
        """As in `enum Format` of csrc/cpu/panels.h."""
        raise NotImplementedError

    def group(self, scheme: WeightScheme, dtype: torch.dtype) -> int:
        """Values of k that share a scale in panels, or that k is padded to a multiple of where there is none.

        Raises:
            ValueError: the scheme's group is none of the format.
        """
        raise NotImplementedError

    def padded(self, scheme: WeightScheme, dtype: torch.dtype, inputs: int) -> int:
        """k of panels: whole groups, and of integers whole chunks of activations."""
        unit = max(self.group(scheme, dtype), CHUNK)
        return -(-inputs // unit) * unit

    def parts(self, scheme: WeightScheme, dtype: torch.dtype, panels: int, inputs: int) -> tuple[Part, ...]:
        """Data, scales and zeros of so many panels, as far as there are any; floats are of that dtype."""
        raise NotImplementedError

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        """[..., K] -> a number for each of k, and scales and zeros [..., groups]."""
        raise NotImplementedError

    def to_panels(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        """Panels of rows [P, 16, K]; see `PackedWeight`."""
        raise NotImplementedError

    def from_panels(self, weight: PackedWeight) -> Tensor:
        """The inverse, but for what was rounded and padded: [P, 16, padded K]."""
        raise NotImplementedError

    def to_rows(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        """Rows [N, K]; see `PackedWeight`."""
        return self.quantized(rows, scheme)

    def from_rows(self, weight: PackedWeight) -> Tensor:
        """The inverse, but for what was rounded: [N, K]."""
        assert weight.scales is not None
        return weight.data.float() * weight.scales.float().unsqueeze(-1)

    def group_in_rows(self, scheme: WeightScheme) -> int:
        """Values of k that share a scale in rows; 0: all of them."""
        return 0

    def pack(self, weight: Tensor, scheme: WeightScheme, halves: int, layout: Layout) -> PackedWeight:
        """The matrix [N, K] in that layout."""
        if layout == "panels":
            data, scales, zeros = self.to_panels(to_panels(weight, halves), scheme)
        else:
            data, scales, zeros = self.to_rows(weight, scheme)
        outputs, inputs = weight.shape
        return PackedWeight(scheme, data, scales, zeros, outputs, inputs, halves, layout)

    def unpack(self, weight: PackedWeight) -> Tensor:
        """The matrix [N, K] that a packed one stands for: its own dtype, float32 where it was quantised."""
        if weight.layout == "rows":
            return self.from_rows(weight)[:, : weight.inputs]
        return from_panels(self.from_panels(weight)[:, :, : weight.inputs], weight.outputs, weight.halves)

    def check(self, op: str, weight: PackedWeight) -> None:
        """That what panels say of themselves fits their memory.

        Raises:
            ValueError, TypeError: it does not.
        """
        dtype = weight.data.dtype
        panels = num_panels(weight.outputs, weight.halves)
        expected = self.parts(weight.scheme, dtype, panels, weight.inputs)
        parts = [part for part in (weight.data, weight.scales, weight.zeros) if part is not None]
        if [part.shape for part in expected] != [part.shape for part in parts] or (
            weight.outputs % weight.halves
        ):
            shapes = [list(part.shape) for part in parts]
            raise ValueError(f"{op}: a {self.kind} weight [{weight.outputs}, {weight.inputs}] holds {shapes}")
        if [part.dtype for part in expected] != [part.dtype for part in parts]:
            raise TypeError(f"{op}: a {self.kind} weight holds {[part.dtype for part in parts]}")
        if not all(part.is_contiguous() and part.device.type == "cpu" for part in parts):
            raise ValueError(f"{op}: a packed weight must be contiguous and on the CPU")


class FloatFormat(Format):
    """As they are; in panels two k of bfloat16 stand together, the second one first."""

    kind = "float"

    def code(self, dtype: torch.dtype) -> int:
        return FLOAT_CODES[dtype]

    def group(self, scheme: WeightScheme, dtype: torch.dtype) -> int:
        return PAIR if dtype is torch.bfloat16 else 1

    def padded(self, scheme: WeightScheme, dtype: torch.dtype, inputs: int) -> int:
        unit = self.group(scheme, dtype)
        return -(-inputs // unit) * unit

    def parts(self, scheme: WeightScheme, dtype: torch.dtype, panels: int, inputs: int) -> tuple[Part, ...]:
        padded = self.padded(scheme, dtype, inputs)
        shape = (panels, padded // PAIR, PANEL, PAIR) if dtype is torch.bfloat16 else (panels, padded, PANEL)
        return (Part(shape, dtype if dtype in FLOAT_CODES else torch.float32),)

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        return Numbers(rows)

    def to_panels(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        by_k = rows.transpose(1, 2)
        if rows.dtype is torch.bfloat16:
            whole = F.pad(by_k, (0, 0, 0, by_k.shape[1] % PAIR))
            by_k = torch.unflatten(whole, 1, (-1, PAIR)).flip(2).transpose(2, 3)
        return Numbers(by_k.contiguous())

    def from_panels(self, weight: PackedWeight) -> Tensor:
        by_k = weight.data
        if by_k.dtype is torch.bfloat16:
            by_k = by_k.transpose(2, 3).flip(2).flatten(1, 2)
        return by_k.transpose(1, 2)

    def from_rows(self, weight: PackedWeight) -> Tensor:
        return weight.data


class Int8Format(Format):
    """Integers of 8 bits with a scale per output; in panels without sign."""

    kind = "int8"

    def code(self, dtype: torch.dtype) -> int:
        return 3

    def group(self, scheme: WeightScheme, dtype: torch.dtype) -> int:
        return CHUNK

    def parts(self, scheme: WeightScheme, dtype: torch.dtype, panels: int, inputs: int) -> tuple[Part, ...]:
        steps = self.padded(scheme, dtype, inputs) // QUAD
        return Part((panels, steps, PANEL, QUAD), torch.uint8), Part((panels, PANEL), torch.float32)

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        wide = rows.float()
        scales = _finite_or_nan(wide.abs().amax(-1) / 127)
        return Numbers(_steps(wide, scales.unsqueeze(-1)).clamp(-127, 127).to(torch.int8), scales)

    def to_panels(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        q, scales, _ = self.quantized(whole_chunks(rows), scheme)
        shifted = (q.short() + INT8_ZERO).to(torch.uint8)
        return Numbers(torch.unflatten(shifted, -1, (-1, QUAD)).transpose(1, 2).contiguous(), scales)

    def from_panels(self, weight: PackedWeight) -> Tensor:
        assert weight.scales is not None
        q = weight.data.float().transpose(1, 2).flatten(2) - INT8_ZERO
        return q * weight.scales.unsqueeze(-1)


class Int4Format(Format):
    """Integers of 4 bits with a scale, and perhaps a zero point, per output and group of k."""

    kind = "int4"

    def code(self, dtype: torch.dtype) -> int:
        return 4

    def group(self, scheme: WeightScheme, dtype: torch.dtype) -> int:
        if scheme.group_size not in GROUP_SIZES:
            raise ValueError(f"int4: group_size must be one of {GROUP_SIZES}; it is {scheme.group_size}")
        return scheme.group_size

    def group_in_rows(self, scheme: WeightScheme) -> int:
        return scheme.group_size

    def parts(self, scheme: WeightScheme, dtype: torch.dtype, panels: int, inputs: int) -> tuple[Part, ...]:
        padded = self.padded(scheme, dtype, inputs)
        of_groups = (panels, padded // scheme.group_size, PANEL)
        data = Part((panels, padded // (2 * QUAD), PANEL, QUAD), torch.uint8)
        scales, zeros = Part(of_groups, torch.bfloat16), Part(of_groups, torch.uint8)
        return (data, scales) if scheme.symmetric else (data, scales, zeros)

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        """k is padded with 0 to whole groups."""
        wide = F.pad(rows.float(), (0, -rows.shape[-1] % scheme.group_size))
        groups = torch.unflatten(wide, -1, (-1, scheme.group_size))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        exact = torch.where(high >= -low, high, low) / -8 if scheme.symmetric else (high - low) / 15
        scales = _finite_or_nan(exact).bfloat16()
        shift = _steps(-low, scales.float()).clamp(0, 15)
        zeros = torch.full_like(exact, _INT4_ZERO) if scheme.symmetric else shift
        q = (_steps(groups, scales.float().unsqueeze(-1)) + zeros.unsqueeze(-1)).clamp(0, 15)
        flat = torch.where(_usable(scales).unsqueeze(-1), q, 0.0).to(torch.uint8).flatten(-2)
        flat[..., rows.shape[-1] :] = 0
        return Numbers(flat, scales, None if scheme.symmetric else zeros.to(torch.uint8))

    def to_panels(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        q, *of_groups = self.quantized(rows, scheme)
        q = whole_chunks(q)
        count = q.shape[-1] // scheme.group_size
        scales, zeros = (
            None if part is None else F.pad(part, (0, count - part.shape[-1])).transpose(1, 2).contiguous()
            for part in of_groups
        )
        low, high = torch.unflatten(q, -1, (-1, 2, QUAD)).unbind(-2)  # [P, 16, K / 8, 4]
        return Numbers((low | high << 4).transpose(1, 2).contiguous(), scales, zeros)

    def from_panels(self, weight: PackedWeight) -> Tensor:
        steps = weight.data.transpose(1, 2)  # [P, 16, K / 8, 4]
        q = torch.stack([steps & 15, steps >> 4], 3).flatten(2)
        scales, zeros = (
            part if part is None else part.transpose(1, 2) for part in (weight.scales, weight.zeros)
        )
        return self._widened(torch.unflatten(q, -1, (-1, weight.scheme.group_size)), scales, zeros)

    def to_rows(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        q, scales, zeros = self.quantized(rows, scheme)
        low, high = torch.unflatten(q, -1, (-1, 2, scheme.group_size // 2)).unbind(-2)
        return Numbers((low | high << 4).flatten(1), scales, zeros)

    def from_rows(self, weight: PackedWeight) -> Tensor:
        packed = torch.unflatten(weight.data, -1, (-1, weight.scheme.group_size // 2))
        return self._widened(torch.cat([packed & 15, packed >> 4], -1), weight.scales, weight.zeros)

    def _widened(self, q: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Tensor:
        """q [..., G, group] -> [..., K]."""
        assert scales is not None
        shift = _INT4_ZERO if zeros is None else zeros.unsqueeze(-1).float()
        return ((q.float() - shift) * scales.unsqueeze(-1).float()).flatten(-2)


class Fp8Format(Format):
    """E4M3 with a scale per output, or one for all; on GPUs alone (P. Micikevicius et al., "FP8 formats for deep
    learning", 2022)."""

    kind = "fp8"
    layouts = ("rows",)

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        wide = rows.float()
        largest = wide.abs().amax().expand(len(wide)) if scheme.per_tensor else wide.abs().amax(1)
        scales = _finite_or_nan(largest / FP8_MAX).contiguous()
        exact = torch.where(_usable(scales).unsqueeze(1), wide / scales.unsqueeze(1), 0.0)
        return Numbers(exact.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales)


FORMATS: Mapping[str, Format] = {
    each.kind: each for each in (FloatFormat(), Int8Format(), Int4Format(), Fp8Format())
}
"""By the kinds of `WeightScheme`."""


def format_of(scheme: WeightScheme) -> Format:
    """The format of such weights."""
    return FORMATS[scheme.kind]


def whole_chunks(rows: Tensor) -> Tensor:
    """[..., K] -> K padded with 0 to whole chunks."""
    return F.pad(rows, (0, -rows.shape[-1] % CHUNK))


def _steps(x: Tensor, scales: Tensor) -> Tensor:
    """x in steps of a scale, ties to even; 0 where there is none."""
    return torch.where(_usable(scales), (x / scales).round(), 0.0).nan_to_num(0.0)


def _usable(scales: Tensor) -> Tensor:
    return (scales < 0) | (scales > 0)


def _finite_or_nan(scales: Tensor) -> Tensor:
    """What is not finite poisons the sums, so that it is seen."""
    return torch.where(scales.isfinite(), scales, torch.nan)
