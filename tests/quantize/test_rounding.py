# SPDX-License-Identifier: Apache-2.0
"""GPTQ against the update it is derived from, and what calibration gains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.formats.search import Steps
from quire.quantize.grid import IntegerGrid
from quire.quantize.inputs import InputStatistics
from quire.quantize.rounding import DAMPING, best_scales, gptq


def correlated(seed: int, num_inputs: int = 192) -> InputStatistics:
    """Inputs that have little of their own, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    few, mix = torch.randn(600, 24, generator=generator), torch.randn(24, num_inputs, generator=generator)
    rows = few @ mix + 0.3 * torch.randn(600, num_inputs, generator=generator)
    rows[:, ::17] *= 12
    statistics = InputStatistics(num_inputs)
    statistics.add(rows)
    return statistics


def weight_of(seed: int, num_inputs: int = 192) -> Tensor:
    return torch.randn(24, num_inputs, generator=torch.Generator().manual_seed(seed))


def output_error(weight: Tensor, rounded: Tensor, inputs: InputStatistics) -> float:
    change = rounded - weight
    return float(torch.sum(change @ inputs.gram * change))


def step_by_step(weight: Tensor, gram: Tensor, grid: IntegerGrid, act_order: bool) -> Tensor:
    """Codes: after each input the best change of all that are left, by the inverse of what is left of X^T X."""
    steps = grid.steps(weight, gram.diagonal())
    damped = gram.double() + DAMPING * gram.diagonal().mean().double() * torch.eye(len(gram)).double()
    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(len(gram))
    rest, left, codes = order.tolist(), weight.double(), torch.zeros_like(weight)
    while rest:
        first = rest[0]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        codes[:, first] = grid.codes(left.float(), steps)[:, first]
        error = left[:, first] - grid.weights(codes, steps)[:, first].double()
        left[:, rest] -= torch.outer(error / inverse[0, 0], inverse[0])
        rest = rest[1:]
    return codes


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("grid", [IntegerGrid(4, 32), IntegerGrid(4, 64, False), IntegerGrid(8, 64)], ids=str)
def test_gptq_makes_the_best_change_after_each_input(grid: IntegerGrid, act_order: bool) -> None:
    weight, gram = weight_of(1), correlated(2).gram / 600
    codes, _ = gptq(weight, gram, grid, act_order=act_order)
    expected = step_by_step(weight, gram, grid, act_order)
    # In float32 a value may fall to the other side of a half; what comes after it differs then, in this row alone.
    assert (codes == expected).all(1).float().mean() >= 0.8
    assert (codes - expected).abs().mean() < 0.1


def test_inputs_that_never_come_cost_nothing() -> None:
    weight, gram = weight_of(3), correlated(4).gram.clone()
    gram[5], gram[:, 5] = 0.0, 0.0
    codes, steps = gptq(weight, gram, IntegerGrid(4, 32))
    assert steps.weights(codes.unflatten(1, (-1, 32))).isfinite().all()
    assert (codes[:, 5] == 8).all()


@pytest.mark.parametrize("grid", [IntegerGrid(4, 32), IntegerGrid(4, 64, False)], ids=str)
def test_calibration_lowers_the_error_of_outputs(grid: IntegerGrid) -> None:
    weight, inputs = weight_of(5), correlated(6)
    steps = grid.steps(weight)
    plain = output_error(weight, grid.weights(grid.codes(weight, steps), steps), inputs)
    of_gptq = output_error(weight, grid.weights(*gptq(weight, inputs.gram, grid)), inputs)
    scales = best_scales(weight, inputs, grid)
    finer = grid.steps(weight * scales, inputs.divided(scales).importance)
    of_awq = output_error(weight, grid.weights(grid.codes(weight * scales, finer), finer) / scales, inputs)
    of_both = output_error(
        weight, grid.weights(*gptq(weight * scales, inputs.divided(scales).gram, grid)) / scales, inputs
    )
    assert of_awq < 0.8 * plain
    assert of_gptq < 0.5 * plain
    assert of_both < 0.8 * of_gptq


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("grid", [IntegerGrid(4, 32), IntegerGrid(4, 64, False), IntegerGrid(8, 64)], ids=str)
def test_scales_are_used_as_they_are_stored(grid: IntegerGrid, small: bool) -> None:
    """float16 has few numbers as small as scales may be, which codes and choices must know."""
    weight = (weight_of(7) * (2.0 ** (grid.bits - 25) if small else 1.0)).half().float()
    stored_as = grid.stored_as(torch.float16)
    steps = stored_as.steps(weight)
    codes = stored_as.codes(weight, steps)
    scales = stored_as.tensors(codes, steps, torch.float16)["weight_scale"]
    stands_for = Steps(scales, steps.zeros).weights(grid.in_groups(codes)).flatten(1)
    assert torch.equal(stored_as.weights(codes, steps), stands_for)
    rounded_late = grid.steps(weight)
    late = Steps(rounded_late.scales.half(), rounded_late.zeros)
    others = late.weights(grid.in_groups(grid.codes(weight, rounded_late))).flatten(1)
    gain = 0.95 if small else 1.001
    assert (stands_for - weight).norm() < gain * (others - weight).norm()
