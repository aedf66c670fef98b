"""GPTQ (E. Frantar et al., 2022, arXiv:2210.17323): what rounding an input's weights costs, later inputs make good.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.search import Steps
from quire.quantize.grid import Grid

DAMPING = 0.01
"""Of the mean of X^T X's diagonal, added to it."""
_BLOCK = 128
"""Inputs whose effect on the ones behind them is added up before it is applied."""


def gptq(weight: Tensor, gram: Tensor, grid: Grid, *, act_order: bool = True) -> tuple[Tensor, Steps]:
    """Codes [N, K] of float32 [N, K] with X^T X [K, K], and their steps, which are found before and do not change.

    With `act_order` inputs are rounded from the largest to the smallest, else as they stand.
    """
    dead = gram.diagonal() == 0
    weight = weight.masked_fill(dead, 0.0)
    steps = grid.steps(weight, gram.diagonal())
    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(len(gram))
    inverse = _inverse(gram[order][:, order], dead[order])
    left = weight[:, order]
    codes = torch.empty_like(left)
    for start in range(0, len(order), _BLOCK):
        end = min(start + _BLOCK, len(order))
        errors = torch.empty_like(left[:, start:end])
        for i in range(start, end):
            group = int(order[i]) // grid.group_size
            own = Steps(steps.scales[:, group : group + 1], steps.zeros[:, group : group + 1])
            column = left[:, i : i + 1].unsqueeze(1)
            code = own.codes(column, grid.bits)
            error = (column - own.weights(code))[:, 0] / inverse[i, i]
            left[:, i:end] -= error * inverse[i, i:end]
            codes[:, i], errors[:, i - start] = code[:, 0, 0], error[:, 0]
        left[:, end:] -= errors @ inverse[start:end, end:]
    return codes[:, order.argsort()], steps


def _inverse(gram: Tensor, dead: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped matrix's inverse: row i is what input i's error does to later ones."""
    diagonal = gram.diagonal() + dead.float()
    damped = gram - gram.diagonal().diag() + (diagonal + DAMPING * diagonal.mean()).diag()
    whole = torch.cholesky_inverse(torch.linalg.cholesky(damped.double()))
    factor: Tensor = torch.linalg.cholesky(whole, upper=True)
    return factor.float()
