# SPDX-License-Identifier: Apache-2.0
"""GPTQ (E. Frantar et al., 2022, arXiv:2210.17323) as AutoGPTQ and GPTQModel write it, and AWQ (J. Lin et al., 2023,
arXiv:2306.00978) in the layout "gemm" of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.linear import WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Stored, every, inputs, outputs, scheme_of
from quire.layers.quantized.integers import (
    by_group,
    group_indices,
    in_turn,
    kind_of,
    reordered,
    unpacked,
    unsigned,
    words_of,
)


@dataclass(frozen=True)
class Gptq(Codec):
    """Integers of 2, 3, 4 or 8 bits; a word holds those of neighboring inputs.

    qweight int32 [K * bits / 32, N]; qzeros int32 [G, N * bits / 32], with zero points minus one in the first version;
    scales [G, N]; g_idx int32 [K], the group of each input, in any order if `reordered`.
    """

    bits: int = 4
    group_size: int = 128
    """-1: one group of all inputs."""
    first_version: bool = True
    symmetric: bool = False
    reordered: bool = False
    groups_in = "g_idx"

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of(kind_of(self.bits), max(self.group_size, 0), shifted=not self.symmetric)

    @property
    def reorders(self) -> bool:
        return self.reordered

    def by_groups(self, groups: Tensor) -> Codec:
        return replace(self, reordered=not in_turn(groups, max(self.group_size, 0)))

    def order(self, groups: Tensor) -> Tensor | None:
        return by_group(groups, max(self.group_size, 0))

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        run, words = words_of(self.bits)
        count = -(-num_inputs // self._group(num_inputs))
        groups = every(count) if self.reordered or self.group_size < 0 else inputs(self.group_size)
        tensors = {
            "qweight": Stored((inputs(run, words), outputs()), (torch.int32,)),
            "qzeros": Stored((groups, outputs(run, words)), (torch.int32,)),
            "scales": Stored((groups, outputs())),
        }
        order = {"g_idx": Stored((inputs(),), (torch.int32,))}
        return tensors | order if self.reordered else tensors

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        scales = tensors["scales"].t()
        data = unpacked(tensors["qweight"], self.bits, 0).t()
        zeros = unpacked(tensors["qzeros"], self.bits, 1)[:, : len(scales)].t()
        if self.first_version:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        if self.symmetric and (zeros != 1 << (self.bits - 1)).any():
            raise ValueError(f"sym is true, but qzeros are not all {1 << (self.bits - 1)}")
        size, points = max(self.group_size, 0), None if self.symmetric else zeros
        if not self.reordered:
            return unsigned(self.bits, size, data, scales, points)
        groups = group_indices("g_idx", tensors["g_idx"], scales.shape[1])
        return reordered(self.bits, size, groups, data, scales, points)

    def _group(self, num_inputs: int) -> int:
        return num_inputs if self.group_size < 0 else self.group_size


_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of the integer of each of eight neighboring outputs."""


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
