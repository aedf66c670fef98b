# SPDX-License-Identifier: Apache-2.0
"""Small floats: E4M3 with scales for blocks of the weight, and 4-bit E2M1 in several tools' layouts.

P. Micikevicius et al., "FP8 formats for deep learning", 2022; MXFP4 (OCP microscaling formats, 2023); NVFP4 (NVIDIA,
2025).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.linear import WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Grid, Stored, every, inputs, outputs, scheme_of


@dataclass(frozen=True)
class Fp8Codec(Codec):
    """weight float8_e4m3fn [N, K], with scales on a grid: for the whole weight, per output, or per block."""

    grid_outputs: int = 0
    grid_inputs: int = 0
    scale: str = "weight_scale"
    """Name of the scales; weights are multiplied by them, whatever the name says."""
    transposed: bool = False
    """True if weight is [K, N]."""

    @property
    def _grid(self) -> Grid:
        return Grid(self.grid_outputs, self.grid_inputs)

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("fp8", self.grid_inputs)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        axes = outputs(), inputs()
        return {
            "weight": Stored(axes[::-1] if self.transposed else axes, (torch.float8_e4m3fn,)),
            self.scale: Stored(self._grid.axes, flat=True),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        data, grid = tensors["weight"].t() if self.transposed else tensors["weight"], self._grid
        return Coded.of("fp8", grid.inputs, data, grid.by_row(tensors[self.scale], len(data)))


BLOCK = 32
"""Numbers of MXFP4 that share a scale."""
NV_BLOCK = 16
"""Numbers of NVFP4 that share a scale."""
_BIAS = 127
"""Bias of the exponent of a scale of MXFP4."""


@dataclass(frozen=True)
class Mxfp4Blocks(Codec):
    """OpenAI's MXFP4: blocks uint8 [N, K / 32, 16] and scales uint8 [N, K / 32]; a byte's low half is first."""

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("e2m1", BLOCK)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return {
            "blocks": Stored((outputs(), inputs(BLOCK), every(BLOCK // 2)), (torch.uint8,)),
            "scales": Stored((outputs(), inputs(BLOCK)), (torch.uint8,)),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        return Coded.of("e2m1", BLOCK, nibbles(tensors["blocks"].flatten(1)), _powers(tensors["scales"]))


@dataclass(frozen=True)
class Mxfp4(Codec):
    """MXFP4 of compressed-tensors: weight_packed uint8 [N, K / 2] and weight_scale uint8 [N, K / 32]."""

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("e2m1", BLOCK)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return {
            "weight_packed": Stored((outputs(), inputs(2)), (torch.uint8,)),
            "weight_scale": Stored((outputs(), inputs(BLOCK)), (torch.uint8,)),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        return Coded.of("e2m1", BLOCK, nibbles(tensors["weight_packed"]), _powers(tensors["weight_scale"]))


@dataclass(frozen=True)
class Nvfp4(Codec):
    """Packed numbers uint8 [N, K / 2], weight_scale float8_e4m3fn [N, K / 16], and a scale of the whole weight.

    compressed-tensors divides by the latter, ModelOpt multiplies by it. If `transposed`, packed numbers are
    [K / 2, N] and scales [K / 16, N].
    """

    packed: str = "weight_packed"
    scale_of_all: str = "weight_global_scale"
    divides: bool = True
    transposed: bool = False

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("e2m1", NV_BLOCK)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        turn = -1 if self.transposed else 1
        return {
            self.packed: Stored((outputs(), inputs(2))[::turn], (torch.uint8,)),
            "weight_scale": Stored((outputs(), inputs(NV_BLOCK))[::turn], (torch.float8_e4m3fn,)),
            self.scale_of_all: Stored((every(),)),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        of_all, packed, scales = (
            tensors[self.scale_of_all],
            tensors[self.packed],
            tensors["weight_scale"].float(),
        )
        if self.transposed:
            packed, scales = packed.t(), scales.t()
        spread = scales / of_all if self.divides else scales * of_all
        return Coded.of("e2m1", NV_BLOCK, nibbles(packed), spread)


def nibbles(pairs: Tensor) -> Tensor:
    """Unpack bytes [N, K / 2], low halves first, into uint8 [N, K]."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def _powers(exponents: Tensor) -> Tensor:
    """Convert biased exponents (E8M0), uint8, to powers of two, which bfloat16 holds."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS).bfloat16()
