# SPDX-License-Identifier: Apache-2.0
"""AWQ (J. Lin et al., 2023, arXiv:2306.00978): finer steps for large inputs, by scales folded into their producers.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.quantize.grid import IntegerGrid
from quire.quantize.inputs import InputStatistics

_NUM_EXPONENTS = 20
_TRIED_OUTPUTS = 128
"""Limit of outputs, spread over all, by which scales are compared; the time is proportional to it."""
_LEAST = 1e-4
"""Least scale before normalization around 1."""


def best_scales(weight: Tensor, inputs: InputStatistics, grid: IntegerGrid) -> Tensor:
    """Return scales [K] that multiply a weight [N, K] and divide its inputs.

    Candidates are magnitudes^a, a from 0 to 1. The best change the outputs least: ||X (W' - W)^T||, W' rounded.
    """
    tried = [_scales(inputs.magnitudes, step / _NUM_EXPONENTS) for step in range(_NUM_EXPONENTS)]
    some = weight[:: -(-len(weight) // _TRIED_OUTPUTS)]
    return min(tried, key=lambda scales: _error(some, scales, inputs, grid))


def _scales(magnitudes: Tensor, exponent: float) -> Tensor:
    scales = magnitudes.pow(exponent).clamp(min=_LEAST)
    return scales / (scales.max() * scales.min()).sqrt()


def _error(weight: Tensor, scales: Tensor, inputs: InputStatistics, grid: IntegerGrid) -> float:
    scaled = weight * scales
    steps = grid.steps(scaled, inputs.importance / scales.square())
    change = grid.weights(grid.codes(scaled, steps), steps) / scales - weight
    return float(torch.sum(change @ inputs.gram * change))
