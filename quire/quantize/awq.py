"""AWQ (J. Lin et al., 2023, arXiv:2306.00978): large inputs get finer steps, by scales that go into what makes them.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.quantize.grid import Grid
from quire.quantize.inputs import InputStatistics

_NUM_EXPONENTS = 20
_TRIED_OUTPUTS = 512
"""Outputs at most by which scales are compared, spread over all, since the time is proportional to them."""
_LEAST = 1e-4
"""Of a scale before all are brought around 1."""


def best_scales(weight: Tensor, inputs: InputStatistics, grid: Grid) -> Tensor:
    """[K], by which a matrix [N, K] is multiplied and its inputs divided.

    Those of magnitudes^a, a from 0 to 1, whose rounded weights change the outputs least: ||X (W' - W)^T||.
    """
    tried = [_scales(inputs.magnitudes, step / _NUM_EXPONENTS) for step in range(_NUM_EXPONENTS)]
    some = weight[:: -(-len(weight) // _TRIED_OUTPUTS)]
    return min(tried, key=lambda scales: _error(some, scales, inputs, grid))


def _scales(magnitudes: Tensor, exponent: float) -> Tensor:
    scales = magnitudes.pow(exponent).clamp(min=_LEAST)
    return scales / (scales.max() * scales.min()).sqrt()


def _error(weight: Tensor, scales: Tensor, inputs: InputStatistics, grid: Grid) -> float:
    scaled = weight * scales
    steps = grid.steps(scaled, inputs.importance / scales.square())
    change = grid.weights(grid.codes(scaled, steps), steps) / scales - weight
    return float(torch.sum(change @ inputs.gram * change))
