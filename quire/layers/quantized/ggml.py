# SPDX-License-Identifier: Apache-2.0
"""Blocks of ggml's quantized types, as stored in GGUF files.

Each function converts blocks [B, bytes] uint8 to the numbers of a packed format, one row per block. Dequantized, they
equal ggml's own reference bit for bit. Names are ggml's: d and dmin are a block's scales, qs the low bits of its
numbers, qh the high ones. 4-bit values are stored as the low halves of some bytes, then the high ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.encoding import TYPES, TensorType
from quire.kernels.formats import BlockScales, Numbers
from quire.kernels.linear import WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Stored, inputs, outputs, scheme_of

_E2M1_BIAS = 127


@dataclass(frozen=True)
class Ggml(Codec):
    """weight uint8 [N, bytes of K numbers], of the type with this name."""

    type: str

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return _PACKED[self.type].scheme

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        kind = TYPES[self.type]
        return {"weight": Stored((outputs(), inputs(kind.size, kind.num_bytes)), (torch.uint8,))}

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        return coded(TYPES[self.type], tensors["weight"])


def coded(kind: TensorType, rows: Tensor) -> Coded:
    """Decode whole blocks [N, bytes] uint8 of a quantized type."""
    packed = _PACKED[kind.name]
    data, scales, zeros = packed.numbers(rows.reshape(-1, kind.num_bytes))
    by_row = (None if each is None else _by_row(each, len(rows)) for each in (scales, zeros))
    return Coded(packed.scheme, Numbers(data.reshape(len(rows), -1), *by_row))


def dequantized(kind: TensorType, rows: Tensor) -> Tensor:
    """Dequantize whole blocks [..., bytes] uint8 of a quantized type to float32 [..., n]."""
    flat = rows.reshape(-1, rows.shape[-1])
    return coded(kind, flat).widened().view(*rows.shape[:-1], -1)


def _by_row(of_blocks: Tensor | BlockScales, num_rows: int) -> Tensor | BlockScales:
    """Reshape [B, n] to [N, n of all blocks of the row]."""
    if isinstance(of_blocks, Tensor):
        return of_blocks.reshape(num_rows, -1)
    return BlockScales(*(each.reshape(num_rows, -1) for each in of_blocks))


def _q4_0(blocks: Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, 2:]), _half(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, 4:]), _half(blocks[:, :2]), -_half(blocks[:, 2:4]))


def _q5_0(blocks: Tensor) -> Numbers:
    return Numbers(_signed(_nibbles(blocks[:, 6:]), _bits(blocks[:, 2:6]), less=16), _half(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> Numbers:
    data = _signed(_nibbles(blocks[:, 8:]), _bits(blocks[:, 4:8]))
    return Numbers(data, _half(blocks[:, :2]), -_half(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> Numbers:
    return Numbers(blocks[:, 2:].view(torch.int8), _half(blocks[:, :2]))


def _q2_k(blocks: Tensor) -> Numbers:
    both = blocks[:, :16]
    scales, minimums = _steps(both & 15, blocks[:, 80:82]), _steps(both >> 4, blocks[:, 82:84])
    return Numbers(_planes(blocks[:, 16:80], bits=2), scales, minimums)


def _q3_k(blocks: Tensor) -> Numbers:
    # A clear bit of the mask subtracts 4 from a number; code 8 has value 0.
    data = 4 + _planes(blocks[:, 32:96], bits=2) + 4 * _planes(blocks[:, :32], bits=1)
    scales = _six_bits_of_16(blocks[:, 96:108]).to(torch.int8) - 32
    return Numbers(data, _steps(scales, blocks[:, 108:110]))


def _q4_k(blocks: Tensor) -> Numbers:
    return Numbers(_planes(blocks[:, 16:], bits=4), *_scales_of_8(blocks))


def _q5_k(blocks: Tensor) -> Numbers:
    data = _signed(_planes(blocks[:, 48:], bits=4), _planes(blocks[:, 16:48], bits=1))
    return Numbers(data, *_scales_of_8(blocks))


def _q6_k(blocks: Tensor) -> Numbers:
    low, high = _planes(blocks[:, :128], bits=4, run=64), _planes(blocks[:, 128:192], bits=2)
    return Numbers(_signed(low, high, less=32), _steps(blocks[:, 192:208].view(torch.int8), blocks[:, 208:]))


def _iq4_nl(blocks: Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, 2:]), _half(blocks[:, :2]))


def _iq4_xs(blocks: Tensor) -> Numbers:
    high, low = _shifted(blocks[:, 2:4], bits=2), _shifted(blocks[:, 4:8], bits=4)
    data = _nibbles(blocks[:, 8:].reshape(-1, 16)).view(len(blocks), -1)
    return Numbers(data, _steps(_signed(low, high, less=32), blocks[:, :2]))


def _mxfp4(blocks: Tensor) -> Numbers:
    exponents = blocks[:, :1].int() - _E2M1_BIAS
    return Numbers(_nibbles(blocks[:, 1:]), torch.ldexp(torch.ones(len(blocks), 1), exponents).bfloat16())


@dataclass(frozen=True)
class _Packed:
    """Packed format that holds blocks exactly, and the conversion of blocks to it."""

    scheme: WeightScheme
    numbers: Callable[[Tensor], Numbers]


_PACKED: Mapping[str, _Packed] = {
    "Q4_0": _Packed(scheme_of("int4", 32), _q4_0),
    "Q4_1": _Packed(scheme_of("int4", 32, shifted=True), _q4_1),
    "Q5_0": _Packed(scheme_of("int6", 32), _q5_0),
    "Q5_1": _Packed(scheme_of("int6", 32, shifted=True), _q5_1),
    "Q8_0": _Packed(scheme_of("int8", 32), _q8_0),
    "Q2_K": _Packed(scheme_of("int4", 16, shifted=True), _q2_k),
    "Q3_K": _Packed(scheme_of("int4", 16), _q3_k),
    "Q4_K": _Packed(scheme_of("int4", 32, shifted=True), _q4_k),
    "Q5_K": _Packed(scheme_of("int6", 32, shifted=True), _q5_k),
    "Q6_K": _Packed(scheme_of("int6", 16), _q6_k),
    "IQ4_NL": _Packed(scheme_of("iq4_nl", 32), _iq4_nl),
    "IQ4_XS": _Packed(scheme_of("iq4_nl", 32), _iq4_xs),
    "MXFP4": _Packed(scheme_of("e2m1", 32), _mxfp4),
}
"""Packed formats by the names of `TYPES`."""


def _half(pairs: Tensor) -> Tensor:
    """View bytes [B, 2] as float16 [B, 1]."""
    return pairs.contiguous().view(torch.float16)


def _steps(factors: Tensor, pairs: Tensor) -> BlockScales:
    """Return factors [B, G], times the float16 in bytes [B, 2]."""
    return BlockScales(factors.to(torch.int8), _half(pairs))


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [B, n] into [B, 2 n]: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bits(packed: Tensor) -> Tensor:
    """Unpack [B, n] into [B, 8 n], the lowest bit of the first byte first."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).flatten(1)


def _shifted(packed: Tensor, bits: int) -> Tensor:
    """Unpack [B, n] into [B, n * 8 / bits] uint8: the numbers of each byte in turn, the lowest first."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & (2**bits - 1)).flatten(1)


def _planes(packed: Tensor, bits: int, run: int = 32) -> Tensor:
    """Unpack [B, n] into [B, n * 8 / bits]: the lowest numbers of each run of bytes, then the next ones up."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    planes = (packed.reshape(len(packed), -1, 1, run) >> places) & (2**bits - 1)
    return planes.flatten(1)


def _scales_of_8(blocks: Tensor) -> tuple[BlockScales, BlockScales]:
    """Return scales and minimums of the eight groups of Q4_K and Q5_K: six bits each, times d and dmin.

    The next 12 bytes hold them. The first eight hold the first four scales and minimums, and in their two high bits the
    high bits of the other four. The low bits of these are the halves of the last four bytes.
    """
    first, second, rest = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=1)
    minimums = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=1)
    return _steps(scales, blocks[:, :2]), _steps(minimums, blocks[:, 2:4])


def _six_bits_of_16(packed: Tensor) -> Tensor:
    """Return Q3_K's scales [B, 16] as stored: eight bytes of low halves, four bytes of two high bits each."""
    low, high = _nibbles(packed[:, :8]), _planes(packed[:, 8:], bits=2, run=4)
    return low + 16 * high


def _signed(low: Tensor, high: Tensor, less: int = 0) -> Tensor:
    """Combine the low four bits and the other bits of numbers, uint8, minus `less`: int8."""
    return (low + 16 * high).to(torch.int8) - less
