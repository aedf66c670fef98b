"""What the blocks of ggml's quantized types stand for.

Each function takes blocks [B, bytes] uint8 and gives their numbers [B, size] float32, by the operations, in their
order, that ggml's own reference uses: so both have the same bits. Names are ggml's: d and dmin are a block's scales, qs
its numbers' low bits, qh the high ones. Whatever is in 4 bits lies as the low halves of some bytes, then the high ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.models.gguf.types import TensorType

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def float_dtype(kind: TensorType) -> torch.dtype | None:
    """The dtype of a type that is none of blocks."""
    return _FLOATS.get(kind.name)


def dequantize(kind: TensorType, rows: Tensor) -> Tensor:
    """Whole blocks [..., bytes] uint8 of a quantized type -> their numbers [..., n] float32."""
    blocks = rows.reshape(-1, kind.num_bytes)
    return _BY_NAME[kind.name](blocks).view(*rows.shape[:-1], -1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _half(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 6:]) + 16 * _bits(blocks[:, 2:6]) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 8:]) + 16 * _bits(blocks[:, 4:8])) + _half(
        blocks[:, 2:4]
    )


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8) * _half(blocks[:, :2])


def _q2_k(blocks: Tensor) -> Tensor:
    scales, qs = blocks[:, :16], _planes(blocks[:, 16:80], bits=2)
    d, dmin = _half(blocks[:, 80:82]), _half(blocks[:, 82:84])
    return _affine(d * (scales & 15), qs, dmin * (scales >> 4))


def _q3_k(blocks: Tensor) -> Tensor:
    # A number is less by 4 where its bit of the mask is not set.
    mask, qs = _planes(blocks[:, :32], bits=1), _planes(blocks[:, 32:96], bits=2)
    d = _half(blocks[:, 108:110])
    return _scaled(d * (_six_bits_of_16(blocks[:, 96:108]) - 32), qs + 4 * mask - 4)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = _scales_of_8(blocks)
    return _affine(scales, _planes(blocks[:, 16:], bits=4), minimums)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _scales_of_8(blocks)
    qs, qh = _planes(blocks[:, 48:], bits=4), _planes(blocks[:, 16:48], bits=1)
    return _affine(scales, qs + 16 * qh, minimums)


def _q6_k(blocks: Tensor) -> Tensor:
    qs, qh = _planes(blocks[:, :128], bits=4, run=64), _planes(blocks[:, 128:192], bits=2)
    return _scaled(_half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8), qs + 16 * qh - 32)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * _looked_up(_IQ4_VALUES, _nibbles(blocks[:, 2:]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    high, low = _shifted(blocks[:, 2:4], bits=2), _shifted(blocks[:, 4:8], bits=4)
    scales = (low + 16 * high).to(torch.int8) - 32
    values = _looked_up(_IQ4_VALUES, _nibbles(blocks[:, 8:].reshape(-1, 16))).view(len(blocks), -1)
    return _scaled(_half(blocks[:, :2]) * scales, values)


def _mxfp4(blocks: Tensor) -> Tensor:
    # The exponent of half a scale, because the values are doubled; below 2 that is a subnormal.
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return bits.view(torch.float32) * _looked_up(_E2M1_DOUBLED, _nibbles(blocks[:, 1:]))


_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def _half(pairs: Tensor) -> Tensor:
    """Bytes [B, 2] of a float16 -> [B, 1] float32."""
    return pairs.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[B, n] -> [B, 2 n] int8: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1).to(torch.int8)


def _bits(packed: Tensor) -> Tensor:
    """[B, n] -> [B, 8 n] int8, the lowest bit of the first byte first."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> places) & 1).flatten(1).to(torch.int8)


def _shifted(packed: Tensor, bits: int) -> Tensor:
    """[B, n] -> [B, n * 8 / bits] uint8: the numbers of a byte, the lowest first, and then those of the next."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> places) & (2**bits - 1)).flatten(1)


def _planes(packed: Tensor, bits: int, run: int = 32) -> Tensor:
    """[B, n] -> [B, n * 8 / bits] int8: of each run of bytes the lowest numbers, then the next ones up."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
    planes = (packed.reshape(len(packed), -1, 1, run) >> places) & (2**bits - 1)
    return planes.flatten(1).to(torch.int8)


def _scales_of_8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums [B, 8] of Q4_K and Q5_K: six bits each, times d and dmin.

    Of the 12 bytes behind these, the first eight hold the first four scales and minimums, and in their two high bits
    those of the other four, whose low bits are the halves of the last four bytes.
    """
    d, dmin, packed = _half(blocks[:, :2]), _half(blocks[:, 2:4]), blocks[:, 4:16]
    first, second, rest = packed.split(4, dim=1)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=1)
    minimums = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=1)
    return d * scales, dmin * minimums


def _six_bits_of_16(packed: Tensor) -> Tensor:
    """Q3_K's scales [B, 16] int8, as stored: eight bytes of low halves, four bytes of two high bits each."""
    low, high = _nibbles(packed[:, :8]), _planes(packed[:, 8:], bits=2, run=4)
    return low + 16 * high


def _looked_up(values: tuple[int, ...], places: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)[places.int()]


def _scaled(scales: Tensor, numbers: Tensor) -> Tensor:
    """Scales [B, G] of groups, times numbers [B, G * n]."""
    return (scales.unsqueeze(-1) * numbers.view(*scales.shape, -1)).flatten(1)


def _affine(scales: Tensor, numbers: Tensor, minimums: Tensor) -> Tensor:
    """As `_scaled`, less the minimums [B, G]."""
    return _scaled(scales, numbers).view(*scales.shape, -1).sub_(minimums.unsqueeze(-1)).flatten(1)
