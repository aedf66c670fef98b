# SPDX-License-Identifier: Apache-2.0
"""The Muon optimizer in float32, matrices of one shape together: on a CPU this is much faster than in bfloat16.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5


def orthogonalized(stacked: Tensor) -> Tensor:
    """About the nearest matrices with orthonormal rows or columns, by Newton-Schulz iterations.

    Args:
        stacked: [matrices, rows, columns].
    """
    a, b, c = COEFFICIENTS
    wide = stacked.mT if stacked.size(1) > stacked.size(2) else stacked
    x = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if stacked.size(1) > stacked.size(2) else x


class Muon(torch.optim.Optimizer):
    """Momentum (Nesterov's), made orthogonal; every parameter is a matrix."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                shapes.setdefault(matrix.shape, []).append(matrix)
            for (rows, columns), matrices in shapes.items():
                updates = orthogonalized(
                    torch.stack([self._momentum(m, group["momentum"]) for m in matrices])
                )
                rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def _momentum(self, matrix: Tensor, momentum: float) -> Tensor:
        gradient = matrix.grad
        if gradient is None:
            raise ValueError("a matrix has no gradient")
        mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
        mean.lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum)
