# SPDX-License-Identifier: Apache-2.0
"""Float weights: unquantized ones, and E4M3 (P. Micikevicius et al., "FP8 formats for deep learning", 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.formats.base import Format, Numbers, PackedPart, finite_or_nan, usable
from quire.kernels.formats.grouped import GroupedFormat
from quire.kernels.formats.integers import in_groups
from quire.kernels.linear import PAIR, PANEL, PackedWeight, WeightScheme, to_panels

FLOAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Float types by their numbers in the C++ kernels: `enum DType` of csrc/cpu/quire_cpu.h."""


class FloatFormat(Format):
    """Unchanged floats; in panels two k of bfloat16 form a pair, the second one first."""

    kind = "float"

    def code(self, dtype: torch.dtype) -> int:
        return FLOAT_CODES[dtype]

    def group(self, scheme: WeightScheme, dtype: torch.dtype) -> int:
        return PAIR if dtype is torch.bfloat16 else 1

    def padded(self, scheme: WeightScheme, dtype: torch.dtype, inputs: int) -> int:
        unit = self.group(scheme, dtype)
        return -(-inputs // unit) * unit

    def parts(
        self, scheme: WeightScheme, dtype: torch.dtype, panels: int, inputs: int
    ) -> tuple[PackedPart, ...]:
        padded = self.padded(scheme, dtype, inputs)
        shape = (panels, padded // PAIR, PANEL, PAIR) if dtype is torch.bfloat16 else (panels, padded, PANEL)
        return (PackedPart(shape, dtype if dtype in FLOAT_CODES else torch.float32),)

    def quantized(self, rows: Tensor, scheme: WeightScheme) -> Numbers:
        return Numbers(rows)

    def to_panels(self, numbers: Numbers, scheme: WeightScheme, halves: int) -> tuple[Tensor | None, ...]:
        by_k = to_panels(numbers.data, halves).transpose(1, 2)
        if by_k.dtype is torch.bfloat16:
            whole = F.pad(by_k, (0, 0, 0, by_k.shape[1] % PAIR))
            by_k = torch.unflatten(whole, 1, (-1, PAIR)).flip(2).transpose(2, 3)
        return by_k.contiguous(), None, None

    def from_panels(self, weight: PackedWeight) -> Tensor:
        by_k = weight.data
        if by_k.dtype is torch.bfloat16:
            by_k = by_k.transpose(2, 3).flip(2).flatten(1, 2)
        return by_k.transpose(1, 2)

    def to_rows(self, numbers: Numbers, scheme: WeightScheme) -> tuple[Tensor | None, ...]:
        return numbers.data, None, None

    def from_rows(self, weight: PackedWeight) -> Tensor:
        return weight.data


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
