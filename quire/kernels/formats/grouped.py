# SPDX-License-Identifier: Apache-2.0
"""Common base of formats with a scale per output and group of k, and 4-bit codes in words, the layout of GPUs.

A word of 32 bits has eight codes of an output. A step of 256 k of an output is 32 adjacent words, one cache line; 16
bytes of them are 32 codes. The k of a step are eight consecutive planes of 32, and a word has one code of each. So one
shift of 32 neighboring words yields the codes of 32 neighboring k, and no lane needs another lane's words. Plane p
starts at bit 4 * (p // 2) + 16 * (p % 2): two planes align with the 16-bit halves of a word.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.base import (
    BLOCK,
    STREAM_CODES,
    BlockScales,
    Format,
    Numbers,
    PackedPart,
    from_stream,
    stream_shape,
    to_stream,
)
from quire.kernels.linear import PANEL, QUAD, PackedWeight, WeightScheme, to_panels

WORDS = 32
"""Words in a step, and values of k in a plane."""
PLANES = 8
WORD_INPUTS = PLANES * WORDS
"""Values of k in a step."""
_PLANES_OF_BYTES = ((0, 2), (4, 6), (1, 3), (5, 7))
"""Planes in the low and in the high half of each byte of a word."""


def to_words(codes: Tensor) -> Tensor:
    """Pack uint8 [N, K], K a multiple of `WORD_INPUTS`, into int32 [N, K / 8]."""
    planes = torch.unflatten(codes, 1, (-1, PLANES, WORDS))
    packed = [planes[:, :, low] | planes[:, :, high] << 4 for low, high in _PLANES_OF_BYTES]
    return torch.stack(packed, -1).view(torch.int32).flatten(1)


def from_words(words: Tensor) -> Tensor:
    """Invert `to_words`."""
    packed = torch.unflatten(words.view(torch.uint8), 1, (-1, WORDS, 4))
    planes = [packed[..., 0]] * PLANES
    for byte, (low, high) in enumerate(_PLANES_OF_BYTES):
        planes[low], planes[high] = packed[..., byte] & 15, packed[..., byte] >> 4
    return torch.stack(planes, 2).flatten(1)


class GroupedFormat(Format):
    """Codes of values, of 4, 6 or 8 bits, with a scale, and perhaps a zero point or a minimum, per group.

    With a scale s, a code c and its value v, a weight is s * v; with a zero point z, s * (c - z); with a minimum m,
    s * v - m.
    """

    per_byte: ClassVar[int]
    """Codes per byte, in rows and, unless `step_shape` and the methods beside it differ, in panels."""
    groups: ClassVar[tuple[int, ...]] = (0, 16, 32, 64, 128, 256)
    """Values of k that may share a scale; 0: all of an output."""
    can_shift: ClassVar[bool] = False
    """True if the format supports zero points and minimums."""

    def codes(self, data: Tensor) -> Tensor:
        """Return the uint8 codes of numbers as checkpoints store them.

        Raises:
            TypeError: they have another dtype.
        """
        raise NotImplementedError

    def values(self, codes: Tensor, scheme: WeightScheme) -> Tensor:
        """Return the values of codes before scaling, in float32."""
        raise NotImplementedError

    def in_rows(self, codes: Tensor) -> Tensor:
        """Return 8-bit codes in the dtype that a GPU reads."""
        raise NotImplementedError

    def zero(self, scheme: WeightScheme) -> int:
        """Return the code of value 0, for integers."""
        return 0

    def scale_dtype(self, scheme: WeightScheme) -> torch.dtype:
        """Return the dtype of the scales that `quantized` makes."""
        return torch.float32

    def streams(self, scheme: WeightScheme) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the scales, and of the zeros if any, that `quantized` makes."""
        return (self.scale_dtype(scheme), torch.uint8)[: 2 - scheme.symmetric]

    def group(self, scheme: WeightScheme, dtype: torch.dtype) -> int:
        if scheme.group_size not in self.groups:
            choices = ", ".join(map(str, self.groups))
            raise ValueError(f"{self.kind}: group_size must be one of {choices}; it is {scheme.group_size}")
        if not (scheme.symmetric or self.can_shift):
            raise ValueError(f"{self.kind}: there are no zero points and no minimums; symmetric is False")
        return scheme.group_size

    def group_in_rows(self, scheme: WeightScheme) -> int:
        return scheme.group_size or (WORD_INPUTS if self.per_byte == 2 else 0)

    def parts(
        self, scheme: WeightScheme, dtype: torch.dtype, panels: int, inputs: int
    ) -> tuple[PackedPart, ...]:
        return self._parts(scheme, panels, inputs, self.streams(scheme))

    def expected(self, op: str, weight: PackedWeight, panels: int) -> tuple[PackedPart, ...]:
        streams = [part.dtype for part in (weight.scales, weight.zeros) if part is not None]
        known = all(dtype in STREAM_CODES for dtype in streams) and torch.uint8 not in streams[:1]
        if not known or (torch.int8 in streams and not weight.scheme.group_size):
            raise TypeError(f"{op}: a {self.kind} weight cannot have scales and zero points in {streams}")
        wanted = 2 - weight.scheme.symmetric
        return self._parts(weight.scheme, panels, weight.inputs, (*streams, torch.float32)[:wanted])

    def _parts(
        self, scheme: WeightScheme, panels: int, inputs: int, streams: Sequence[torch.dtype]
    ) -> tuple[PackedPart, ...]:
        padded = self.padded(scheme, torch.uint8, inputs)
        group = scheme.group_size or padded
        data = PackedPart((panels, *self.step_shape(padded)), torch.uint8)
        return data, *(
            PackedPart(stream_shape(each, panels, padded // group, group), each) for each in streams
        )

    def to_panels(self, numbers: Numbers, scheme: WeightScheme, halves: int) -> tuple[Tensor | None, ...]:
        self._check(numbers, scheme)
        inputs = numbers.data.shape[1]
        padded = self.padded(scheme, torch.uint8, inputs)
        codes = self.codes(to_panels(_padded(numbers.data, padded), halves))
        count = padded // (scheme.group_size or padded)
        streams = (
            None if each is None else to_stream(each, halves, count)
            for each in (numbers.scales, numbers.zeros)
        )
        return self.to_steps(codes), *streams

    def step_shape(self, padded: int) -> tuple[int, ...]:
        """Return the shape of a panel's codes for so many values of k."""
        return padded // (self.per_byte * QUAD), PANEL, QUAD

    def to_steps(self, codes: Tensor) -> Tensor:
        """Pack codes [P, 16, K] into panels [P, *step_shape]."""
        words = codes.contiguous().view(torch.int32)  # a quad in each
        if self.per_byte == 2:
            words = words[:, :, ::2] | words[:, :, 1::2] << 4
        return torch.unflatten(words.transpose(1, 2).contiguous().view(torch.uint8), 2, (PANEL, QUAD))

    def from_steps(self, panels: Tensor) -> Tensor:
        """Invert `to_steps`."""
        steps = panels.transpose(1, 2)
        return (torch.stack([steps & 15, steps >> 4], 3) if self.per_byte == 2 else steps).flatten(2)

    def from_panels(self, weight: PackedWeight) -> Tensor:
        group = weight.scheme.group_size
        streams = (
            None if part is None else from_stream(part, group) for part in (weight.scales, weight.zeros)
        )
        return self.widened(self.from_steps(weight.data), weight.scheme, *streams)

    def to_rows(self, numbers: Numbers, scheme: WeightScheme) -> tuple[Tensor | None, ...]:
        self._check(numbers, scheme)
        streams = [
            each.float() if isinstance(each, BlockScales) else each
            for each in (numbers.scales, numbers.zeros)
        ]
        if self.per_byte == 1:
            one = scheme.group_size == 0
            scales, zeros = (each[:, 0] if one and each is not None else each for each in streams)
            return self.in_rows(self.codes(numbers.data)).contiguous(), scales, zeros
        padded = -(-numbers.data.shape[1] // WORD_INPUTS) * WORD_INPUTS
        codes, count = self.codes(_padded(numbers.data, padded)), padded // self.group_in_rows(scheme)
        scales, zeros = (
            None if each is None else _by_group(each, count, of_all=scheme.group_size == 0)
            for each in streams
        )
        return to_words(codes), scales, zeros

    def from_rows(self, weight: PackedWeight) -> Tensor:
        if self.per_byte == 2:
            streams = (None if part is None else part.t() for part in (weight.scales, weight.zeros))
            return self.widened(from_words(weight.data), weight.scheme, *streams)
        streams = (
            part.unsqueeze(1) if part is not None and part.dim() == 1 else part
            for part in (weight.scales, weight.zeros)
        )
        return self.widened(self.codes(weight.data), weight.scheme, *streams)

    def widened(
        self, codes: Tensor, scheme: WeightScheme, scales: Tensor | None, zeros: Tensor | None = None
    ) -> Tensor:
        """Dequantize codes [..., K] with scales and zeros [..., G], groups of any size: float32 [..., K], or more."""
        assert scales is not None
        group = -(-codes.shape[-1] // scales.shape[-1]) if scheme.group_size == 0 else scheme.group_size
        groups = torch.unflatten(_padded(codes, scales.shape[-1] * group), -1, (-1, group))
        scale, values = scales.float().unsqueeze(-1), self.values(groups, scheme)
        if zeros is None:
            return (values * scale).flatten(-2)
        shift = zeros.float().unsqueeze(-1)
        if zeros.dtype is torch.uint8:
            return ((values - (shift - self.zero(scheme))) * scale).flatten(-2)
        return (values * scale - shift).flatten(-2)

    def _check(self, numbers: Numbers, scheme: WeightScheme) -> None:
        """Check that numbers match the scheme.

        Raises:
            ValueError, TypeError: they do not.
        """
        outputs, inputs = numbers.data.shape
        group = self.group(scheme, torch.uint8) or inputs
        shape, given = (outputs, -(-inputs // group)), (numbers.scales, numbers.zeros)
        for name, each, wanted in zip(("scales", "zeros"), given, (True, not scheme.symmetric), strict=True):
            if (each is not None) != wanted:
                raise ValueError(
                    f"{self.kind}: {name} must {'' if wanted else 'not '}be given; symmetric is {scheme.symmetric}"
                )
            if each is not None:
                in_blocks = isinstance(each, BlockScales)
                _check_stream(
                    f"{self.kind}: {name} of [{outputs}, {inputs}] in groups of {group}",
                    each,
                    (outputs, -(-inputs // BLOCK) * (BLOCK // group)) if in_blocks else shape,
                )
        if any(isinstance(each, BlockScales) for each in given) and not scheme.group_size:
            raise ValueError(
                f"{self.kind}: steps are of {BLOCK} values of k in groups; the scheme has one group of all"
            )


def _by_group(stream: Tensor, count: int, *, of_all: bool) -> Tensor:
    """Transpose [N, G] to [count, N], with zeros for further groups; `of_all`: repeat the only group for each."""
    if of_all:
        return stream.t().expand(count, -1).contiguous()
    return F.pad(stream.t(), (0, 0, 0, count - stream.shape[1])).contiguous()


def _check_stream(name: str, of: Tensor | BlockScales, shape: tuple[int, int]) -> None:
    of_groups = of if isinstance(of, Tensor) else of.factors
    if of_groups.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}; they are {list(of_groups.shape)}")
    if isinstance(of, BlockScales):
        types, steps = (of.factors.dtype, of.steps.dtype), list(of.steps.shape)
        if types != (torch.int8, torch.float16) or steps[0] != shape[0] or shape[1] % steps[1]:
            raise ValueError(f"{name} must be int8 with float16 steps; they are {types}, steps {steps}")
    elif of.dtype not in STREAM_CODES or of.dtype is torch.int8:
        raise TypeError(f"{name} cannot be {of.dtype}")


def _padded(rows: Tensor, size: int) -> Tensor:
    """Pad [..., K] with zeros to [..., size]."""
    return F.pad(rows.view(torch.uint8), (0, size - rows.shape[-1])).view(rows.dtype)
