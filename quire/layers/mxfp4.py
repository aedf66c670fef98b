"""Checkpoints in MXFP4 (OCP microscaling formats, 2023): numbers of 4 bits, 32 of which share a power of two.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from quire.layers.base import parameter
from quire.layers.quantization import QuantMethod
from quire.layers.slot import Part, Slot

if TYPE_CHECKING:
    from quire.layers.matrix import MatrixLayer

BLOCK = 32
"""Numbers that share a scale."""
_BYTES = BLOCK // 2
_BIAS = 127
"""What the exponent of a scale is larger by."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4(QuantMethod):
    """Reads `blocks` uint8 [N, K / 32, 16] and `scales` uint8 [N, K / 32], and keeps the weight as `kept` does.

    What the file stands for is a float in bfloat16 without rounding.
    """

    name = "mxfp4"

    def __init__(self, kept: QuantMethod) -> None:
        super().__init__(kept.scheme)
        self._kept = kept

    @property
    def input_unit(self) -> int:
        return math.lcm(BLOCK, self._kept.input_unit)

    def create(self, layer: MatrixLayer) -> None:
        read = self._groups(layer)
        shape = (layer.num_rows, read.stop - read.start)
        layer.weight = None
        layer.blocks = parameter(*shape, _BYTES, dtype=torch.uint8)
        layer.scales = parameter(*shape, dtype=torch.uint8)

    def slots(self, layer: MatrixLayer, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        read, every, whole = self._groups(layer), slice(0, -(-layer.inputs // BLOCK)), slice(0, _BYTES)
        for name, target, more in (("blocks", layer.blocks, (whole,)), ("scales", layer.scales, ())):
            for piece in layer.pieces(names):
                shape = (piece.num_rows, every.stop, *(side.stop for side in more))
                part = Part(shape, (piece.region, every, *more), (piece.rows, read, *more))
                yield (
                    f"{piece.name}.{name}",
                    Slot(cast(Tensor, target)[piece.place], "zeros", part, (torch.uint8,)),
                )

    def replaced(self, layer: MatrixLayer, device_type: str) -> Collection[str]:
        return ("blocks", "scales")

    def finish(self, layer: MatrixLayer) -> None:
        weight = decoded(cast(Tensor, layer.blocks), cast(Tensor, layer.scales), layer.dtype)
        del layer.blocks, layer.scales
        layer.adopt(weight)
        self._kept.finish(layer)

    def _groups(self, layer: MatrixLayer) -> slice:
        """Of a row, those that are read."""
        read = self._kept.read(layer)
        return slice(read.start // BLOCK, -(-read.stop // BLOCK))


def decoded(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What blocks [N, G, 16] and scales [N, G] stand for, [N, 32 G]; the low half of a byte is the first number."""
    wide = torch.float32 if dtype == torch.float16 else dtype
    numbers = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], dtype=wide, device=blocks.device)
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)
    values = pairs[blocks.int()].flatten(2)
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _BIAS).to(wide)
    return (values * powers.unsqueeze(-1)).flatten(1).to(dtype)
