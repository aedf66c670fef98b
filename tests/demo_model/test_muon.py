# SPDX-License-Identifier: Apache-2.0
"""The optimizer does what torch's own does, which computes in bfloat16."""

from __future__ import annotations

import torch

from demo_model.muon import Muon, orthogonalized


def test_steps_equal_torch() -> None:
    torch.manual_seed(0)
    begun = [torch.randn(rows, columns) for rows, columns in ((8, 24), (24, 8), (16, 16), (8, 24))]
    mine, theirs = ([matrix.clone().requires_grad_() for matrix in begun] for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.01}
    optimizers = Muon(mine, **options), torch.optim.Muon(theirs, **options, adjust_lr_fn="original")
    for _ in range(3):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, start in zip(mine, theirs, begun, strict=True):
        assert (one - other).norm() < 0.03 * (one - start).norm()


def test_rows_come_out_about_orthonormal() -> None:
    torch.manual_seed(1)
    singular = torch.linalg.svdvals(orthogonalized(torch.randn(3, 12, 30)))
    assert singular.min() > 0.5
    assert singular.max() < 1.5
