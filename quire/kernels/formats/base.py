# SPDX-License-Identifier: Apache-2.0
"""Base of weight formats: quantization, layout and dequantization; and streams of scales and shifts of groups of k.

Invariant: only `quantized` rounds, and both layouts hold its numbers, or a checkpoint's: a weight has the same numbers
on every device.

A stream is float32, bfloat16 or float16 (a number for each group), uint8 (integer zero points), or int8. int8 holds
blocks of 256 k, or fewer at the end: 16 steps in float16, then 16 factors for each group of the block.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.linear import (
    CHUNK,
    PANEL,
    Layout,
    PackedWeight,
    WeightScheme,
    from_panels,
    num_panels,
    to_panels,
)

BLOCK = 256
"""Values of k whose groups share a step."""
STREAM_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
"""Stream types by their numbers in the C++ kernels: `enum Stream` of csrc/cpu/scaling.h."""
_STEP_BYTES = 2 * PANEL


class BlockScales(NamedTuple):
    """Scales, or minimums, of groups as in K-quants: integers times a step that a block of 256 k shares.

    `steps` is float16 [N, B], a step for each 256 values of k; the last block may be partial. `factors` is int8
    [N, G], of whole blocks. Their products are exact in float32.
    """

    factors: Tensor
    steps: Tensor

    def float(self) -> Tensor:
        """Return the number of each group in float32: [N, G]."""
        each = self.factors.shape[1] // self.steps.shape[1]
        return self.factors.float() * self.steps.float().repeat_interleave(each, 1)


def stream_shape(dtype: torch.dtype, panels: int, groups: int, group: int) -> tuple[int, ...]:
    """Return the shape of a stream of that many panels and groups of `group` values of k."""
    if dtype is not torch.int8:
        return panels, groups, PANEL
    blocks = -(-groups * group // BLOCK)
    return panels, blocks * _STEP_BYTES + groups * PANEL


def to_stream(of: Tensor | BlockScales, halves: int, groups: int) -> Tensor:
    """Convert [N, G] to panels, with zeros for further outputs and groups."""
    if isinstance(of, Tensor):
        return _by_group(F.pad(of, (0, groups - of.shape[1])), halves)
    blocks = of.steps.shape[1]
    steps = _by_group(of.steps, halves).view(torch.int8)
    factors = torch.unflatten(_by_group(of.factors, halves), 1, (blocks, -1))
    stream = torch.cat([steps, factors.flatten(2)], 2).flatten(1)
    return stream[:, : blocks * _STEP_BYTES + groups * PANEL].contiguous()


def from_stream(stream: Tensor, group: int) -> Tensor:
    """Invert `to_stream` for groups of `group` values of k; blocks become their products: [P, 16, G]."""
    if stream.dtype is not torch.int8:
        return stream.transpose(1, 2)
    block_bytes = _STEP_BYTES + BLOCK // group * PANEL
    blocks = torch.unflatten(F.pad(stream, (0, -stream.shape[1] % block_bytes)), 1, (-1, block_bytes))
    steps = blocks[..., :_STEP_BYTES].contiguous().view(torch.float16).float()
    factors = torch.unflatten(blocks[..., _STEP_BYTES:], 2, (-1, PANEL)).float()
    return (factors * steps.unsqueeze(2)).flatten(1, 2).transpose(1, 2)


def _by_group(rows: Tensor, halves: int) -> Tensor:
    return to_panels(rows, halves).transpose(1, 2).contiguous()


class Numbers(NamedTuple):
    """Weight as a format keeps it: a number for each k, and the scales and shifts of groups of k.

    `data` is [N, K]. `scales` and `zeros` are [N, G], G = 1 where all k of an output share one. `zeros` in uint8 are
    integer zero points, w = scale * (q - zero); others are minimums, w = scale * q - minimum.
    """

    data: Tensor
    scales: Tensor | BlockScales | None = None
    zeros: Tensor | BlockScales | None = None


class PackedPart(NamedTuple):
    """Shape and dtype of a tensor of a packed weight in panels."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Format:
    """Base class of all formats."""

    kind: ClassVar[str]
    together: ClassVar[int] = 1
    """Neighboring activations whose magnitudes share a range of 8 bits in the fast mode; 0: all 8 bits span the range
    of the chunk's values and 0."""

    def code(self, dtype: torch.dtype) -> int:
        """Return the number of the format in `enum Format` of csrc/cpu/panels.h."""
        raise NotImplementedError

    def group(self, scheme: WeightScheme, dtype: torch.dtype) -> int:
        """Return the values of k per scale in panels, 0 for all of them; for floats, the unit that k is padded to.

        Raises:
            ValueError: the format does not support the scheme's group size.
        """
        raise NotImplementedError

    def padded(self, scheme: WeightScheme, dtype: torch.dtype, inputs: int) -> int:
        """Return k of panels, padded to whole groups, and for integers to whole chunks of activations."""
        unit = max(self.group(scheme, dtype), CHUNK)
        return -(-inputs // unit) * unit

    def parts(
        self, scheme: WeightScheme, dtype: torch.dtype, panels: int, inputs: int
    ) -> tuple[PackedPart, ...]:
        """Return data, scales and zeros of that many panels, as `quantized` makes them; floats are of `dtype`."""
        raise NotImplementedError

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        """Quantize [N, K] of any float dtype."""
        raise NotImplementedError

    def to_panels(self, numbers: Numbers, scheme: WeightScheme, halves: int) -> tuple[Tensor | None, ...]:
        """Return data, scales and zeros in panels; see `PackedWeight`."""
        raise NotImplementedError

    def from_panels(self, weight: PackedWeight) -> Tensor:
        """Return the weights that panels represent: [P, 16, padded K]."""
        raise NotImplementedError

    def to_rows(self, numbers: Numbers, scheme: WeightScheme) -> tuple[Tensor | None, ...]:
        """Return data, scales and zeros in rows; see `PackedWeight`."""
        raise NotImplementedError

    def from_rows(self, weight: PackedWeight) -> Tensor:
        """Return the weights that rows represent: [N, K], or more columns."""
        raise NotImplementedError

    def group_in_rows(self, scheme: WeightScheme) -> int:
        """Return the values of k per scale in rows; 0: all of them."""
        return 0

    def from_numbers(
        self, numbers: Numbers, scheme: WeightScheme, halves: int = 1, layout: Layout = "panels"
    ) -> PackedWeight:
        """Return the weight with exactly these numbers, in that layout.

        Raises:
            ValueError, TypeError: the numbers do not match the scheme.
        """
        if layout == "panels":
            data, scales, zeros = self.to_panels(numbers, scheme, halves)
        else:
            data, scales, zeros = self.to_rows(numbers, scheme)
        assert data is not None
        outputs, inputs = numbers.data.shape
        return PackedWeight(scheme, data, scales, zeros, outputs, inputs, halves, layout)

    def pack(self, weight: Tensor, scheme: WeightScheme, halves: int, layout: Layout) -> PackedWeight:
        """Quantize the weight [N, K] into that layout."""
        return self.from_numbers(self.quantized(weight, scheme), scheme, halves, layout)

    def unpack(self, weight: PackedWeight) -> Tensor:
        """Return a packed weight as [N, K]: in its own dtype, or in float32 if it was quantized."""
        if weight.layout == "rows":
            return self.from_rows(weight)[:, : weight.inputs]
        return from_panels(self.from_panels(weight)[:, :, : weight.inputs], weight.outputs, weight.halves)

    def multiplied(self, weight: PackedWeight) -> Tensor:
        """Return the weight that matmuls use, where it differs from the stored one."""
        return self.unpack(weight)

    def expected(self, op: str, weight: PackedWeight, panels: int) -> tuple[PackedPart, ...]:
        """Return data, scales and zeros in panels of a weight of this scheme and these dtypes.

        Raises:
            TypeError: the format does not support these dtypes.
        """
        return self.parts(weight.scheme, weight.data.dtype, panels, weight.inputs)

    def check(self, op: str, weight: PackedWeight) -> None:
        """Check that the metadata of panels matches their memory.

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
    """Replace scales that are not finite by NaN, which shows in the sums."""
    return torch.where(scales.isfinite(), scales, torch.nan)


def usable(scales: Tensor) -> Tensor:
    """Return a mask of the scales that numbers can be divided by."""
    return (scales < 0) | (scales > 0)


def steps_of(x: Tensor, scales: Tensor) -> Tensor:
    """Return x in steps of a scale, ties to even; 0 where there is no scale to divide by."""
    return torch.where(usable(scales), (x / scales).round(), 0.0).nan_to_num(0.0)


def whole_chunks(rows: Tensor) -> Tensor:
    """Pad K of [..., K] with 0 to whole chunks."""
    return F.pad(rows, (0, -rows.shape[-1] % CHUNK))
