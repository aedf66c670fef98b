"""What calibration learns of the inputs of a linear layer: X^T X, and the mean magnitude of each.

Shapes: T tokens, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quire.layers.linear import Linear


class InputStatistics:
    """Sums over rows of inputs."""

    def __init__(self, num_inputs: int) -> None:
        self.gram = torch.zeros(num_inputs, num_inputs)
        self._magnitudes = torch.zeros(num_inputs)
        self.num_rows = 0

    def add(self, rows: Tensor) -> None:
        """Count rows [T, K]."""
        rows = rows.float()
        self.gram.addmm_(rows.t(), rows)
        self._magnitudes += rows.abs().sum(0)
        self.num_rows += len(rows)

    @property
    def magnitudes(self) -> Tensor:
        """Mean of each input: [K]."""
        return self._magnitudes / self.num_rows

    @property
    def importance(self) -> Tensor:
        """Mean square of each input: [K]."""
        return self.gram.diagonal() / self.num_rows

    def divided(self, scales: Tensor) -> InputStatistics:
        """Of the same inputs, divided by scales [K]."""
        others = InputStatistics(0)
        others.gram, others.num_rows = self.gram / scales / scales.unsqueeze(1), self.num_rows
        others._magnitudes = self._magnitudes / scales
        return others


@contextmanager
def watched(layers: Iterable[Linear]) -> Iterator[dict[Linear, InputStatistics]]:
    """While this lasts, the inputs of these layers are counted; those that are never called have no entry."""
    found: dict[Linear, InputStatistics] = {}
    layers = list(layers)
    for layer in layers:
        _watch(layer, found)
    try:
        yield found
    finally:
        for layer in layers:
            del layer.forward


def _watch(layer: Linear, found: dict[Linear, InputStatistics]) -> None:
    forward = layer.forward

    def counted(x: Tensor, *rest: Any) -> Any:
        found.setdefault(layer, InputStatistics(layer.inputs)).add(x)
        return forward(x, *rest)

    layer.forward = counted  # type: ignore[method-assign, assignment]  # the instance's own, for as long as it is watched
