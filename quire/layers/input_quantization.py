# SPDX-License-Identifier: Apache-2.0
"""Activation quantization of a linear layer's input, per merged part, as the checkpoint specifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.linear import RowQuantization
from quire.layers.slot import length


@dataclass(frozen=True)
class InputQuantization:
    """Activation quantizations of a layer (None: none) and the outputs computed with each, covering all outputs in
    order.
    """

    ways: tuple[RowQuantization | None, ...]
    outputs: tuple[tuple[int, slice], ...]
    """(index into `ways`, outputs)."""

    @staticmethod
    def of(
        modules: Sequence[tuple[RowQuantization | None, Sequence[slice]]],
        columns: slice,
        inputs: int,
        name: str,
    ) -> InputQuantization:
        """Return the quantization of a layer's modules, each with its outputs; the rank holds `columns` of the inputs.

        Raises:
            ConfigError: inputs that share a scale belong to several ranks.
        """
        ways = tuple(dict.fromkeys(way for way, _ in modules))
        for way in ways:
            if way is not None and way.scale is None and length(columns) < inputs:
                _check_cut(way, columns, name)
        outputs = sorted(
            ((ways.index(way), place) for way, places in modules for place in places),
            key=lambda each: each[1].start,
        )
        return InputQuantization(ways, tuple(outputs))

    @property
    def shifts(self) -> bool:
        """True if any of the quantizations may have zero points."""
        return any(way is not None and way.shifts for way in self.ways)

    def product(self, x: Tensor, product: Callable[[Tensor, RowQuantization | None], Tensor]) -> Tensor:
        """Return `product(x, way)` [..., K] -> [..., N], each output from x quantized as its module specifies."""
        made = [product(x, way) for way in self.ways]
        if len(made) == 1:
            return made[0]
        return torch.cat([made[index][..., place] for index, place in self.outputs], -1)


def _check_cut(way: RowQuantization, columns: slice, name: str) -> None:
    if not way.group or columns.start % way.group or columns.stop % way.group:
        shared = f"{way.group} inputs" if way.group else "all inputs"
        raise ConfigError(
            f"--quantization-config: mode checkpoint: {name}: a scale covers {shared} of a token, which "
            "are split over ranks: give precise, or fast"
        )
