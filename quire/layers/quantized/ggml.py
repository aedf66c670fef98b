"""The blocks of ggml's quantized types, as GGUF files have them.

Each function takes blocks [B, bytes] uint8 and gives what `Coded` has of their numbers [B, size]. Widened, these are
the bits that ggml's own reference makes. Names are ggml's: d and dmin are a block's scales, qs its numbers' low bits,
qh the high ones. What is in 4 bits lies as the low halves of some bytes, then the high ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.config.ggml_types import TYPES, TensorType
from quire.kernels.formats.scaling import BlockScales
from quire.layers.quantized.codec import Codec, Coded, Stored, inputs, outputs

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class Ggml(Codec):
    """weight uint8 [N, bytes of K numbers], of a type by its name."""

    type: str

    @property
    def _type(self) -> TensorType:
        return TYPES[self.type]

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        rows = (outputs(), inputs(self._type.size, self._type.num_bytes))
        return {"weight": Stored(rows, (torch.uint8,))}

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        return coded(self._type, tensors["weight"])


def coded(kind: TensorType, rows: Tensor) -> Coded:
    """Whole blocks [N, bytes] uint8 of a quantized type."""
    of_blocks = _BY_NAME[kind.name](rows.reshape(-1, kind.num_bytes))
    return replace(
        of_blocks,
        data=_by_row(of_blocks.data, len(rows)),
        scales=_by_row(of_blocks.scales, len(rows)),
        zeros=None if of_blocks.zeros is None else _by_row(of_blocks.zeros, len(rows)),
        minimums=None if of_blocks.minimums is None else _by_row(of_blocks.minimums, len(rows)),
    )


def dequantized(kind: TensorType, rows: Tensor) -> Tensor:
    """Whole blocks [..., bytes] uint8 of a quantized type -> their numbers [..., n] float32."""
    flat = rows.reshape(-1, rows.shape[-1])
    return coded(kind, flat).widened().view(*rows.shape[:-1], -1)


def _by_row(of_blocks: Tensor | BlockScales, num_rows: int) -> Any:
    """[B, n] -> [N, n of all of its blocks]."""
    if isinstance(of_blocks, BlockScales):
        return BlockScales(*(each.reshape(num_rows, -1) for each in of_blocks))
    return of_blocks.reshape(num_rows, -1)


def _q4_0(blocks: Tensor) -> Coded:
    d = _half(blocks[:, :2])
    return Coded(_nibbles(blocks[:, 2:]), 32, d, zeros=torch.full_like(d, 8, dtype=torch.uint8))


def _q4_1(blocks: Tensor) -> Coded:
    return Coded(_nibbles(blocks[:, 4:]), 32, _half(blocks[:, :2]), minimums=-_half(blocks[:, 2:4]))


def _q5_0(blocks: Tensor) -> Coded:
    data = _nibbles(blocks[:, 6:]) + 16 * _bits(blocks[:, 2:6])
    return Coded(data.to(torch.int8) - 16, 32, _half(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> Coded:
    data = _nibbles(blocks[:, 8:]) + 16 * _bits(blocks[:, 4:8])
    return Coded(data.to(torch.int8), 32, _half(blocks[:, :2]), minimums=-_half(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> Coded:
    return Coded(blocks[:, 2:].view(torch.int8), 32, _half(blocks[:, :2]))


def _q2_k(blocks: Tensor) -> Coded:
    scales = blocks[:, :16]
    minimums = _steps(scales >> 4, blocks[:, 82:84])
    return Coded(
        _planes(blocks[:, 16:80], bits=2), 16, _steps(scales & 15, blocks[:, 80:82]), minimums=minimums
    )


def _q3_k(blocks: Tensor) -> Coded:
    # A number is less by 4 where its bit of the mask is not set.
    data = _planes(blocks[:, 32:96], bits=2) + 4 * _planes(blocks[:, :32], bits=1)
    scales = _six_bits_of_16(blocks[:, 96:108]).to(torch.int8) - 32
    return Coded(data.to(torch.int8) - 4, 16, _steps(scales, blocks[:, 108:110]))


def _q4_k(blocks: Tensor) -> Coded:
    scales, minimums = _scales_of_8(blocks)
    return Coded(_planes(blocks[:, 16:], bits=4), 32, scales, minimums=minimums)


def _q5_k(blocks: Tensor) -> Coded:
    scales, minimums = _scales_of_8(blocks)
    data = _planes(blocks[:, 48:], bits=4) + 16 * _planes(blocks[:, 16:48], bits=1)
    return Coded(data.to(torch.int8), 32, scales, minimums=minimums)


def _q6_k(blocks: Tensor) -> Coded:
    data = _planes(blocks[:, :128], bits=4, run=64) + 16 * _planes(blocks[:, 128:192], bits=2)
    scales = blocks[:, 192:208].view(torch.int8)
    return Coded(data.to(torch.int8) - 32, 16, _steps(scales, blocks[:, 208:]))


def _iq4_nl(blocks: Tensor) -> Coded:
    return Coded(_looked_up(_IQ4_VALUES, _nibbles(blocks[:, 2:])), 32, _half(blocks[:, :2]))


def _iq4_xs(blocks: Tensor) -> Coded:
    high, low = _shifted(blocks[:, 2:4], bits=2), _shifted(blocks[:, 4:8], bits=4)
    data = _looked_up(_IQ4_VALUES, _nibbles(blocks[:, 8:].reshape(-1, 16))).view(len(blocks), -1)
    return Coded(data, 32, _steps((low + 16 * high).to(torch.int8) - 32, blocks[:, :2]))


def _mxfp4(blocks: Tensor) -> Coded:
    # The exponent of half a scale, because the values are doubled; below 2 that is a subnormal.
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return Coded(_looked_up(_E2M1_DOUBLED, _nibbles(blocks[:, 1:])), 32, bits.view(torch.float32))


_BY_NAME: dict[str, Callable[[Tensor], Coded]] = {
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
    """Bytes [B, 2] of a float16 -> [B, 1]."""
    return pairs.contiguous().view(torch.float16)


def _steps(factors: Tensor, pairs: Tensor) -> BlockScales:
    """Factors [B, G], times the float16 in bytes [B, 2]."""
    return BlockScales(factors.to(torch.int8), _half(pairs))


def _nibbles(packed: Tensor) -> Tensor:
    """[B, n] -> [B, 2 n]: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bits(packed: Tensor) -> Tensor:
    """[B, n] -> [B, 8 n], the lowest bit of the first byte first."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).flatten(1)


def _shifted(packed: Tensor, bits: int) -> Tensor:
    """[B, n] -> [B, n * 8 / bits] uint8: the numbers of a byte, the lowest first, and then those of the next."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & (2**bits - 1)).flatten(1)


def _planes(packed: Tensor, bits: int, run: int = 32) -> Tensor:
    """[B, n] -> [B, n * 8 / bits]: of each run of bytes the lowest numbers, then the next ones up."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    planes = (packed.reshape(len(packed), -1, 1, run) >> places) & (2**bits - 1)
    return planes.flatten(1)


def _scales_of_8(blocks: Tensor) -> tuple[BlockScales, BlockScales]:
    """Scales and minimums of the eight groups of Q4_K and Q5_K: six bits each, times d and dmin.

    Of the 12 bytes behind these, the first eight hold the first four scales and minimums, and in their two high bits
    those of the other four, whose low bits are the halves of the last four bytes.
    """
    first, second, rest = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=1)
    minimums = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=1)
    return _steps(scales, blocks[:, :2]), _steps(minimums, blocks[:, 2:4])


def _six_bits_of_16(packed: Tensor) -> Tensor:
    """Q3_K's scales [B, 16], as stored: eight bytes of low halves, four bytes of two high bits each."""
    low, high = _nibbles(packed[:, :8]), _planes(packed[:, 8:], bits=2, run=4)
    return low + 16 * high


def _looked_up(values: tuple[int, ...], places: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int8, device=places.device)[places.int()]
