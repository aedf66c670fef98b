"""What a format of weights is: how they are rounded, how they lie, what they stand for.

Invariant: `quantized` alone rounds, and both layouts hold what it makes, or what a checkpoint has: a weight has the
same numbers on every device.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.scaling import BlockScales
from quire.kernels.linear import (
    CHUNK,
    Layout,
    PackedWeight,
    WeightScheme,
    from_panels,
    num_panels,
)


class Numbers(NamedTuple):
    """A matrix as a format keeps it: a number for each of k, and what groups of them are scaled and shifted by.

    `data` is [N, K]. `scales` and `zeros` are [N, G], G = 1 where all k of an output share one. `zeros` in uint8 are
    integer zero points, w = scale * (q - zero); others are minimums, w = scale * q - minimum.
    """

    data: Tensor
    scales: Tensor | BlockScales | None = None
    zeros: Tensor | BlockScales | None = None


class Part(NamedTuple):
    """A tensor of a packed weight in panels."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Format:
    """Base of all formats."""

    kind: ClassVar[str]
    together: ClassVar[int] = 1
    """Neighbouring activations whose magnitudes share a range of 8 bits in the fast mode; 0: the range of the chunk's
    values and 0 has all 8 bits."""

    def code(self, dtype: torch.dtype) -> int:
        """As in `enum Format` of csrc/cpu/panels.h."""
        raise NotImplementedError

    def group(self, scheme: WeightScheme, dtype: torch.dtype) -> int:
        """Values of k that share a scale in panels, 0 for all of them; of floats, what k is padded to a multiple of.

        Raises:
            ValueError: the scheme's group is none of the format.
        """
        raise NotImplementedError

    def padded(self, scheme: WeightScheme, dtype: torch.dtype, inputs: int) -> int:
        """k of panels: whole groups, and of integers whole chunks of activations."""
        unit = max(self.group(scheme, dtype), CHUNK)
        return -(-inputs // unit) * unit

    def parts(self, scheme: WeightScheme, dtype: torch.dtype, panels: int, inputs: int) -> tuple[Part, ...]:
        """Data, scales and zeros of so many panels, as `quantized` makes them; floats are of that dtype."""
        raise NotImplementedError

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        """[N, K] of any float dtype, rounded."""
        raise NotImplementedError

    def to_panels(self, numbers: Numbers, scheme: WeightScheme, halves: int) -> tuple[Tensor | None, ...]:
        """Data, scales and zeros in panels; see `PackedWeight`."""
        raise NotImplementedError

    def from_panels(self, weight: PackedWeight) -> Tensor:
        """What they stand for: [P, 16, padded K]."""
        raise NotImplementedError

    def to_rows(self, numbers: Numbers, scheme: WeightScheme) -> tuple[Tensor | None, ...]:
        """Data, scales and zeros in rows; see `PackedWeight`."""
        raise NotImplementedError

    def from_rows(self, weight: PackedWeight) -> Tensor:
        """What they stand for: [N, K] or more."""
        raise NotImplementedError

    def group_in_rows(self, scheme: WeightScheme) -> int:
        """Values of k that share a scale in rows; 0: all of them."""
        return 0

    def from_numbers(
        self, numbers: Numbers, scheme: WeightScheme, halves: int = 1, layout: Layout = "panels"
    ) -> PackedWeight:
        """The matrix of exactly these numbers, in that layout.

        Raises:
            ValueError, TypeError: they are none of the scheme's.
        """
        if layout == "panels":
            data, scales, zeros = self.to_panels(numbers, scheme, halves)
        else:
            data, scales, zeros = self.to_rows(numbers, scheme)
        assert data is not None
        outputs, inputs = numbers.data.shape
        return PackedWeight(scheme, data, scales, zeros, outputs, inputs, halves, layout)

    def pack(self, weight: Tensor, scheme: WeightScheme, halves: int, layout: Layout) -> PackedWeight:
        """The matrix [N, K] in that layout, rounded."""
        return self.from_numbers(self.quantized(weight, scheme), scheme, halves, layout)

    def unpack(self, weight: PackedWeight) -> Tensor:
        """The matrix [N, K] that a packed one stands for: its own dtype, float32 where it was quantised."""
        if weight.layout == "rows":
            return self.from_rows(weight)[:, : weight.inputs]
        return from_panels(self.from_panels(weight)[:, :, : weight.inputs], weight.outputs, weight.halves)

    def multiplied(self, weight: PackedWeight) -> Tensor:
        """The matrix that products are made with, where that is another one."""
        return self.unpack(weight)

    def expected(self, op: str, weight: PackedWeight, panels: int) -> tuple[Part, ...]:
        """Data, scales and zeros that a weight of its scheme and dtypes has in panels.

        Raises:
            TypeError: there are none of such dtypes.
        """
        return self.parts(weight.scheme, weight.data.dtype, panels, weight.inputs)

    def check(self, op: str, weight: PackedWeight) -> None:
        """That what panels say of themselves fits their memory.

        Raises:
            ValueError, TypeError: it does not.
        """
        expected = self.expected(op, weight, num_panels(weight.outputs, weight.halves))
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


def finite_or_nan(scales: Tensor) -> Tensor:
    """What is not finite poisons the sums, so that it is seen."""
    return torch.where(scales.isfinite(), scales, torch.nan)


def usable(scales: Tensor) -> Tensor:
    """Whether numbers can be divided by a scale."""
    return (scales < 0) | (scales > 0)


def steps_of(x: Tensor, scales: Tensor) -> Tensor:
    """x in steps of a scale, ties to even; 0 where there is none."""
    return torch.where(usable(scales), (x / scales).round(), 0.0).nan_to_num(0.0)


def whole_chunks(rows: Tensor) -> Tensor:
    """[..., K] -> K padded with 0 to whole chunks."""
    return F.pad(rows, (0, -rows.shape[-1] % CHUNK))
