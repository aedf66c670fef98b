# SPDX-License-Identifier: Apache-2.0
"""E4M3 (P. Micikevicius et al., "FP8 formats for deep learning", 2022)."""

import torch
from torch import Tensor

from quire.kernels.formats.base import Numbers, finite_or_nan, usable
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.formats.integers import in_groups
from quire.kernels.linear import WeightScheme

FP8_MAX = 448.0
"""Largest E4M3 number."""


class Fp8Format(GroupedFormat):
    """E4M3 with a scale per output or group of k, or one for all. On a CPU activations are not rounded."""

    kind = "fp8"
    per_byte = 1

    def code(self, dtype: torch.dtype) -> int:
        return 5

    def codes(self, data: Tensor) -> Tensor:
        if data.dtype not in (torch.float8_e4m3fn, torch.uint8):
            raise TypeError(f"fp8: numbers must be float8_e4m3fn, or their bytes; they are {data.dtype}")
        return data.view(torch.uint8)

    def values(self, codes: Tensor, scheme: WeightScheme) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()

    def in_rows(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn)

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        groups = in_groups(rows, scheme)
        largest = groups.abs().amax(-1)
        scales = finite_or_nan(
            (largest.amax().expand_as(largest) if scheme.per_tensor else largest) / FP8_MAX
        )
        exact = torch.where(usable(scales).unsqueeze(-1), groups / scales.unsqueeze(-1), 0.0)
        codes = exact.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return Numbers(codes.flatten(1)[:, : rows.shape[1]], scales.contiguous())
