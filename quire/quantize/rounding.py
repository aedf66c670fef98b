# SPDX-License-Identifier: Apache-2.0
"""Rounding of weights that uses statistics of their inputs.

GPTQ (E. Frantar et al., 2022, arXiv:2210.17323): later inputs compensate the error of rounding an input's weights. AWQ
(J. Lin et al., 2023, arXiv:2306.00978): finer steps for large inputs, by scales folded into their producers.

Shapes: N outputs, K inputs. GPTQ holds weights as [K, N], so that an input's weights are adjacent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.formats.base import usable
from quire.kernels.formats.search import Steps
from quire.quantize.grid import IntegerGrid
from quire.quantize.inputs import InputStatistics

DAMPING = 0.01
"""Fraction of the mean of X^T X's diagonal that is added to the diagonal."""
_BLOCK = 64
"""Inputs whose effect on later ones is accumulated before it is applied."""


def gptq(weight: Tensor, gram: Tensor, grid: IntegerGrid, *, act_order: bool = True) -> tuple[Tensor, Steps]:
    """Return codes [N, K] and steps of float32 [N, K] with X^T X [K, K]; steps are chosen first and stay fixed.

    Concatenate weights with the same inputs, [N1 + N2, K]: most of the time is the same for any N.
    With `act_order` inputs are rounded from the largest to the smallest, else in order.
    """
    dead = gram.diagonal() == 0
    weight = weight.masked_fill(dead, 0.0)
    steps = grid.steps(weight, gram.diagonal())
    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(len(gram))
    inverse = _inverse(gram[order][:, order], dead[order])
    left = weight.t()[order]
    codes = torch.empty_like(left)
    by_group = _StepsByGroup.of(steps, grid.bits)
    groups = (order // grid.group_size).tolist()
    for start in range(0, len(order), _BLOCK):
        end = min(start + _BLOCK, len(order))
        errors = torch.empty_like(left[start:end])
        factors = (inverse[start:end, start:end] / inverse.diagonal()[start:end, None]).contiguous()
        for i in range(start, end):
            code, stands_for = by_group.rounded(left[i], groups[i])
            errors[i - start] = error = left[i] - stands_for
            codes[i] = code
            left[i + 1 : end].addr_(factors[i - start, i - start + 1 :], error, alpha=-1)
        scaled = inverse[start:end, end:] / inverse.diagonal()[start:end, None]
        left[end:].addmm_(scaled.t(), errors, alpha=-1)
    return codes[order.argsort()].t().contiguous(), steps


class _StepsByGroup(NamedTuple):
    """Steps [G, N] of each group, with divisors that are never 0, and the largest code."""

    scales: Tensor
    divisors: Tensor
    zeros: Tensor
    most: Tensor
    """Largest code; 0 where there is no scale to divide by."""

    @staticmethod
    def of(steps: Steps, bits: int) -> _StepsByGroup:
        scales = steps.scales.float().t().contiguous()
        divides = usable(scales)
        most = torch.where(divides, float((1 << bits) - 1), 0.0)
        return _StepsByGroup(scales, torch.where(divides, scales, 1.0), steps.zeros.t().contiguous(), most)

    def rounded(self, weights: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Return the codes of one input's weights [N] and their dequantized values."""
        zeros = self.zeros[group]
        codes = (weights / self.divisors[group]).round_().add_(zeros).clamp_(min=0).minimum(self.most[group])
        return codes, (codes - zeros).mul_(self.scales[group])


def _inverse(gram: Tensor, dead: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the damped matrix's inverse; row i is the effect of input i on later ones."""
    diagonal = gram.diagonal() + dead.float()
    damped = gram - gram.diagonal().diag() + (diagonal + DAMPING * diagonal.mean()).diag()
    whole = torch.cholesky_inverse(torch.linalg.cholesky(damped.double()))
    factor: Tensor = torch.linalg.cholesky(whole, upper=True)
    return factor.float()


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
