# SPDX-License-Identifier: Apache-2.0
"""Calibration statistics of a linear layer's inputs: X^T X, and the mean magnitude of each input.

Shapes: T tokens, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quire.layers.linear import Linear

_MOST_HELD = 1024  # rows per matmul


class InputStatistics:
    """Accumulated sums over rows of inputs."""

    def __init__(self, num_inputs: int) -> None:
        self._gram = torch.zeros(num_inputs, num_inputs)
        self._magnitudes = torch.zeros(num_inputs)
        self._held: list[Tensor] = []
        self._num_held = 0
        self.num_rows = 0

    def add(self, rows: Tensor) -> None:
        """Accumulate rows [T, K]."""
        self._held.append(rows.to(torch.float32, copy=True))  # the next step reuses its memory
        self.num_rows += len(rows)
        self._num_held += len(rows)
        if self._num_held >= _MOST_HELD:
            self._accumulate_held()

    @property
    def gram(self) -> Tensor:
        """X^T X: [K, K]."""
        self._accumulate_held()
        return self._gram

    def _accumulate_held(self) -> None:
        """Accumulate the held rows: a matmul of many rows takes less time per row than one of few."""
        if self._held:
            rows = torch.cat(self._held)
            self._gram.addmm_(rows.t(), rows)
            self._magnitudes += rows.abs().sum(0)
            self._held, self._num_held = [], 0

    @property
    def magnitudes(self) -> Tensor:
        """Mean magnitude of each input: [K]."""
        self._accumulate_held()
        return self._magnitudes / self.num_rows

    @property
    def importance(self) -> Tensor:
        """Mean square of each input: [K]."""
        return self.gram.diagonal() / self.num_rows

    def divided(self, scales: Tensor) -> InputStatistics:
        """Return the statistics of the same inputs divided by scales [K]."""
        others = InputStatistics(0)
        others._gram, others.num_rows = self.gram / scales / scales.unsqueeze(1), self.num_rows
        others._magnitudes = self._magnitudes / scales
        return others


@contextmanager
def watched(layers: Iterable[Linear]) -> Iterator[dict[Linear, InputStatistics]]:
    """Yield statistics of these layers' inputs within the context; layers that are never called have no entry."""
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
        if layer not in found:
            found[layer] = InputStatistics(layer.inputs)
        found[layer].add(x)
        return forward(x, *rest)

    layer.forward = counted  # type: ignore[method-assign, assignment]  # the instance's own, for as long as it is watched
