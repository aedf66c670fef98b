# SPDX-License-Identifier: Apache-2.0
"""Weight formats, one object each: quantization, layout and dequantization.

A kind of `WeightScheme` is a row of `FORMATS`; the kernels of a device have a table of the kinds that they support. A
new format defines its numbers here, in panels, in rows or in both; it is then packed, checked and unpacked.
"""

from collections.abc import Mapping

from quire.kernels.formats.base import STREAM_CODES, BlockScales, Format, Numbers, whole_chunks
from quire.kernels.formats.books import BOOKS
from quire.kernels.formats.floats import FLOAT_CODES, FP8_MAX, FloatFormat, Fp8Format
from quire.kernels.formats.integers import Int4Format, Int6Format, Int8Format
from quire.kernels.linear import WeightScheme

__all__ = [
    "FLOAT_CODES",
    "FORMATS",
    "FP8_MAX",
    "STREAM_CODES",
    "BlockScales",
    "Format",
    "Numbers",
    "format_of",
    "whole_chunks",
]

FORMATS: Mapping[str, Format] = {
    each.kind: each for each in (FloatFormat(), Int8Format(), Int6Format(), Int4Format(), Fp8Format(), *BOOKS)
}
"""Formats by the kinds of `WeightScheme`."""


def format_of(scheme: WeightScheme) -> Format:
    """Return the format of a scheme's weights."""
    return FORMATS[scheme.kind]
