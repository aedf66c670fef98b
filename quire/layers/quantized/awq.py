# SPDX-License-Identifier: Apache-2.0
"""AWQ (J. Lin et al., 2023, arXiv:2306.00978) in the layout "gemm" of AutoAWQ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.linear import WeightScheme
from quire.layers.quantized.bits import unpacked
from quire.layers.quantized.codec import Codec, Coded, Stored, every, inputs, outputs, scheme_of

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of the integer of each of eight neighbouring outputs."""


@dataclass(frozen=True)
class Awq(Codec):
    """4-bit integers; a word holds those of eight outputs.

    qweight int32 [K, N / 8]; qzeros int32 [G, N / 8]; scales [G, N].
    """

    group_size: int = 128
    """-1: one group of all inputs."""
    zero_points: bool = True

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("int4", max(self.group_size, 0), shifted=self.zero_points)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        groups = every() if self.group_size < 0 else inputs(self.group_size)
        tensors = {
            "qweight": Stored((inputs(), outputs(8)), (torch.int32,)),
            "scales": Stored((groups, outputs())),
        }
        zeros = {"qzeros": Stored((groups, outputs(8)), (torch.int32,))}
        return tensors | zeros if self.zero_points else tensors

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        zeros = _by_output(tensors["qzeros"]) if self.zero_points else None
        return Coded.of(
            "int4", max(self.group_size, 0), _by_output(tensors["qweight"]), tensors["scales"].t(), zeros
        )


def _by_output(words: Tensor) -> Tensor:
    """Unpack [R, N / 8] into uint8 [N, R]."""
    numbers = unpacked(words, 4, 1).unflatten(1, (-1, 8))[..., _ORDER]
    return numbers.flatten(1).t()
