"""MXFP4 (OCP microscaling formats, 2023): numbers of 4 bits, 32 of which share a power of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.quantized.codec import Codec, Coded, Stored, every, inputs, outputs

BLOCK = 32
"""Numbers that share a scale."""
_BIAS = 127
"""What the exponent of a scale is larger by."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Mxfp4(Codec):
    """As OpenAI writes it: blocks uint8 [N, K / 32, 16] and scales uint8 [N, K / 32]; a byte's low half is first."""

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return {
            "blocks": Stored((outputs(), inputs(BLOCK), every(BLOCK // 2)), (torch.uint8,)),
            "scales": Stored((outputs(), inputs(BLOCK)), (torch.uint8,)),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        return Coded(e2m1(tensors["blocks"].flatten(1)), BLOCK, powers(tensors["scales"]))


def e2m1(pairs: Tensor) -> Tensor:
    """Bytes [N, K / 2], whose low halves come first -> bfloat16 [N, K], which holds all sixteen numbers."""
    numbers = torch.tensor(
        [*_MAGNITUDES, *(-each for each in _MAGNITUDES)], dtype=torch.bfloat16, device=pairs.device
    )
    table = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)
    return table[pairs.int()].flatten(-2)


def powers(exponents: Tensor) -> Tensor:
    """Biased exponents, uint8 -> float32 powers of two (E8M0)."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS)
