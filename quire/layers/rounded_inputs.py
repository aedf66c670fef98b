"""What a matrix is multiplied by where a checkpoint says how that is rounded, perhaps each part of it otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.rounding import RowRounding
from quire.layers.slot import length


@dataclass(frozen=True)
class RoundedInputs:
    """Ways to round rows, None for not at all, and the outputs that are made of each: all of a layer's, in turn."""

    ways: tuple[RowRounding | None, ...]
    outputs: tuple[tuple[int, slice], ...]
    """The index of a way, and outputs."""

    @staticmethod
    def of(
        modules: Sequence[tuple[RowRounding | None, Sequence[slice]]], columns: slice, inputs: int, name: str
    ) -> RoundedInputs:
        """Of the modules in a layer, each with its outputs; the rank has `columns` of so many inputs.

        Raises:
            ConfigError: inputs that share a scale are those of several ranks.
        """
        ways = tuple(dict.fromkeys(way for way, _ in modules))
        for way in ways:
            if way is not None and way.scale is None and length(columns) < inputs:
                _check_cut(way, columns, name)
        outputs = sorted(
            ((ways.index(way), place) for way, places in modules for place in places),
            key=lambda each: each[1].start,
        )
        return RoundedInputs(ways, tuple(outputs))

    @property
    def shifts(self) -> bool:
        """Whether any way may have zero points."""
        return any(way is not None and way.shifts for way in self.ways)

    def product(self, x: Tensor, product: Callable[[Tensor, RowRounding | None], Tensor]) -> Tensor:
        """What `product`, from [..., K] to [..., N], makes of x, rounded for each output as its module wants it."""
        made = [product(x, way) for way in self.ways]
        if len(made) == 1:
            return made[0]
        return torch.cat([made[index][..., place] for index, place in self.outputs], -1)


def _check_cut(way: RowRounding, columns: slice, name: str) -> None:
    if not way.group or columns.start % way.group or columns.stop % way.group:
        shared = f"{way.group} inputs" if way.group else "all inputs"
        raise ConfigError(
            f"--quantization-config: mode checkpoint: {name}: a scale stands for {shared} of a token, of which "
            "ranks have parts: give precise, or fast"
        )
