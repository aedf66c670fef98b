# SPDX-License-Identifier: Apache-2.0
"""Integer grid that weights are quantized to, and its layout in a file.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.formats.search import Steps, best_steps

GROUP_SIZES = (128, 64, 32)
AUTO = 0  # as a group size: the largest that divides the inputs of all layers


@dataclass(frozen=True)
class IntegerGrid:
    """Integers of `bits`; a scale, and unless `symmetric` a zero point, per output and `group_size` inputs."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    scales: torch.dtype = torch.bfloat16
    """Dtype that scales are rounded to before use."""

    def stored_as(self, dtype: torch.dtype) -> IntegerGrid:
        """Return the grid for scales stored as `dtype`: float16 is finer than bfloat16, with less range."""
        return replace(self, scales=torch.float16 if dtype is torch.float16 else torch.bfloat16)

    def steps(self, weight: Tensor, importance: Tensor | None = None) -> Steps:
        """Return the steps of float32 [N, K] with the least squared error, weighted by `importance` [K]."""
        by_group = None if importance is None else importance.view(-1, self.group_size)
        return best_steps(self.in_groups(weight), self.bits, self.symmetric, self.scales, by_group)

    def codes(self, weight: Tensor, steps: Steps) -> Tensor:
        """Return codes [N, K], rounded to nearest, in 0 .. 2^bits - 1."""
        return steps.codes(self.in_groups(weight), self.bits).flatten(1)

    def weights(self, codes: Tensor, steps: Steps) -> Tensor:
        """Return the dequantized values of codes [N, K]."""
        return steps.weights(self.in_groups(codes)).flatten(1)

    def in_groups(self, matrix: Tensor) -> Tensor:
        """Return [N, K] as [N, G, group]."""
        return torch.unflatten(matrix, 1, (-1, self.group_size))

    def tensors(self, codes: Tensor, steps: Steps, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return a module's tensors in compressed-tensors' form "pack-quantized", named without the module.

        weight_packed int32 [N, K * bits / 32], the first integer in the lowest bits; weight_scale [N, G] of `dtype`;
        weight_zero_point int32 [N * bits / 32, G]; weight_shape int64 [2].
        """
        tensors = {
            "weight_packed": _packed(codes, self.bits),
            "weight_scale": steps.scales.to(dtype),
            "weight_shape": torch.tensor(codes.shape),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = _packed(steps.zeros.t(), self.bits).t().contiguous()
        return tensors

    def config(self, ignore: list[str], *, reordered: bool) -> Mapping[str, Any]:
        """Return the `quantization_config` of a checkpoint with all linear layers but `ignore` on the grid."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group",
            "group_size": self.group_size,
            "dynamic": False,
            "actorder": "static" if reordered else None,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "kv_cache_scheme": None,
        }


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack [R, C] into int32 [R, C * bits / 32], padded with zeros."""
    per_word = 32 // bits
    whole = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (torch.unflatten(whole, 1, (-1, per_word)) << shifts).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()
