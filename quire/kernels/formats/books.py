# SPDX-License-Identifier: Apache-2.0
"""4-bit codes that index 16 numbers: 4-bit floats, and tables that suit weights."""

import torch
from torch import Tensor

from quire.kernels.formats.base import Numbers, finite_or_nan, usable
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.formats.integers import in_groups
from quire.kernels.linear import PackedWeight, WeightScheme

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class BookFormat(GroupedFormat):
    """Codes whose values are entries of a book.

    The fast mode multiplies integers: the entries in steps of `unit`, rounded where they are not multiples of it.
    """

    per_byte = 2
    together = 2

    def __init__(self, kind: str, code: int, book: tuple[float, ...], unit: float) -> None:
        self.kind = kind  # type: ignore[misc]
        self.book = torch.tensor(book, dtype=torch.float32)
        self.unit = unit
        self._code = code

    def code(self, dtype: torch.dtype) -> int:
        return self._code

    def codes(self, data: Tensor) -> Tensor:
        if data.dtype is not torch.uint8:
            raise TypeError(f"{self.kind}: numbers must be uint8 in 0..15; they are {data.dtype}")
        return data

    def values(self, codes: Tensor, scheme: WeightScheme) -> Tensor:
        return self.book.to(codes.device)[codes.int()]

    def multiplied(self, weight: PackedWeight) -> Tensor:
        if not weight.scheme.fast or weight.layout == "rows":
            return self.unpack(weight)
        return BookFormat(self.kind, self._code, tuple(self.rounded().tolist()), self.unit).unpack(weight)

    def rounded(self) -> Tensor:
        """Return the book as the fast mode uses it."""
        return (self.book / self.unit).round() * self.unit

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        groups, book = in_groups(rows, scheme), self.book.to(rows.device)
        values, order = book.sort(stable=True)
        largest = book.abs().amax()
        scales = finite_or_nan(groups.abs().amax(-1) / largest)
        exact = torch.where(usable(scales).unsqueeze(-1), groups / scales.unsqueeze(-1), 0.0).nan_to_num(0.0)
        nearest = order[torch.bucketize(exact, (values[1:] + values[:-1]) / 2)].to(torch.uint8)
        return Numbers(nearest.flatten(1)[:, : rows.shape[1]], scales)


def _with_sign(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
    return (*magnitudes, *(-each for each in magnitudes))


BOOKS = (
    BookFormat("e2m1", 6, _with_sign(_E2M1), 0.5),
    BookFormat("iq4_nl", 7, _IQ4_NL, 1.0),
    BookFormat("nf4", 8, _NF4, 1 / 127),
    BookFormat("fp4", 9, _with_sign(_FP4), 1 / 127),
)
"""E2M1 (OCP microscaling formats, 2023), the table of GGUF's IQ4_NL, NormalFloat (T. Dettmers et al., 2023,
arXiv:2305.14314), and bitsandbytes' own float."""
