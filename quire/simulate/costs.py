# SPDX-License-Identifier: Apache-2.0
"""Step costs of a machine, fitted to the steps of a recorded run.

A plan costs a constant and an amount per request, plus for each forward pass of it (a multi-step plan has several) a
constant, an amount per request that samples, an amount per attended position, and one per row, which is a token that
the pass computes. The first rows of a pass cost less than later ones where reading the weights takes longer than
multiplying by them, and kernels differ by the number of rows, so each band of rows has an amount of its own (the
roofline model, Williams et al., 2009). Rows that only generate read their
cache alone, and prompts share what they read, so their positions differ, too. All amounts are at least 0, so more work
never costs less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.engine.trace import Ended, Planned, Returned, Trace
from quire.errors import ConfigError
from quire.scheduler.output import SchedulerOutput

MIN_STEPS = 30
"""Steps that a fit needs: several times as many as it has amounts."""
MAX_CHANGES = 100  # Of the set of amounts above 0; a fit takes about as many as it has amounts.
MAX_SLOPE = 1e-10  # Improvement by an amount, relative to the number of steps, at which a fit has converged.
BANDS = (4, 8, 16, 32, 64)
"""Rows at which a band of rows ends and the next one begins: batches that a calibration measures."""


@dataclass(frozen=True)
class StepWork:
    """Work of one plan.

    Args:
        requests: requests of the plan.
        passes: forward passes.
        samples: sampled tokens, over all passes.
        rows: computed tokens, over all passes, by their band in the pass.
        positions: attended positions of generated tokens, themselves included.
        prompt_positions: those of other computed tokens.
    """

    requests: int
    passes: int
    samples: int
    rows: tuple[int, ...]
    positions: int
    prompt_positions: int

    def features(self) -> tuple[float, ...]:
        """Return what each amount of `PlanCosts` is multiplied by."""
        return (
            1.0,
            self.requests,
            self.passes,
            self.samples,
            *self.rows,
            self.positions,
            self.prompt_positions,
        )


@dataclass(frozen=True)
class PlanCosts:
    """Seconds of a plan, by its work.

    Args:
        plan_s: of a plan, its bookkeeping included.
        request_s: of a request of a plan.
        pass_s: of a forward pass.
        sample_s: of a request that samples, in each pass.
        row_to_4_s: of a row of a pass, up to the fourth; further rows have further amounts.
        position_s: of an attended position of a generated token.
        prompt_position_s: of another attended position.
        error: mean relative error of the steps that the amounts were fitted to.
        num_steps: their number.
    """

    plan_s: float
    request_s: float
    pass_s: float
    sample_s: float
    row_to_4_s: float
    row_to_8_s: float
    row_to_16_s: float
    row_to_32_s: float
    row_to_64_s: float
    row_s: float
    position_s: float
    prompt_position_s: float
    error: float = 0.0
    num_steps: int = 0

    def __post_init__(self) -> None:
        for name, amount in zip(AMOUNTS, self.amounts(), strict=True):
            if not 0.0 <= amount < np.inf:
                raise ConfigError(f"{name} of step costs must be a number of seconds from 0 on, got {amount}")
        if not self.plan_s + self.request_s + self.pass_s + self.row_to_4_s > 0.0:  # every step has these
            raise ConfigError(
                "plan_s, request_s, pass_s and row_to_4_s of step costs are all 0: steps that take no time never end"
            )

    def amounts(self) -> tuple[float, ...]:
        """Return the amounts, in the order of `StepWork.features`."""
        return tuple(getattr(self, name) for name in AMOUNTS)

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a plan."""
        return sum(amount * count for amount, count in zip(self.amounts(), work.features(), strict=True))


ROW_AMOUNTS = (*(f"row_to_{end}_s" for end in BANDS), "row_s")
AMOUNTS = ("plan_s", "request_s", "pass_s", "sample_s", *ROW_AMOUNTS, "position_s", "prompt_position_s")


@dataclass(frozen=True)
class MeasuredStep:
    """Work and duration of a recorded plan."""

    work: StepWork
    seconds: float


def work_of(
    starts: Sequence[int], num_tokens: Sequence[int], samples: Sequence[int], passes: int
) -> StepWork:
    """Return the work of a plan.

    Args:
        starts: computed tokens of each request before the plan.
        num_tokens: tokens of each request that the first pass computes.
        samples: tokens that each request samples in all passes.
        passes: forward passes; each further one computes the last sampled token of every request.
    """
    positions = prompt_positions = 0
    for start, count, sampled in zip(starts, num_tokens, samples, strict=True):
        attended = _attended(start, count)
        if count == 1 and sampled:
            positions += attended
        else:
            prompt_positions += attended
        positions += _attended(start + count, passes - 1)
    first, later = _bands(sum(num_tokens)), _bands(len(starts))
    rows = tuple(one + (passes - 1) * other for one, other in zip(first, later, strict=True))
    return StepWork(len(starts), passes, sum(samples), rows, positions, prompt_positions)


def _bands(num_rows: int) -> list[int]:
    """Return the rows of a pass in each band."""
    ends = (*BANDS, num_rows)
    return [max(min(num_rows, end) - begin, 0) for begin, end in zip((0, *BANDS), ends, strict=True)]


def work_of_plan(plan: SchedulerOutput, passes: int) -> StepWork:
    """Return the work of a plan that runs for some passes."""
    return work_of(
        [one.start for one in plan.scheduled],
        [one.num_tokens for one in plan.scheduled],
        [passes if one.num_samples else 0 for one in plan.scheduled],
        passes,
    )


def _attended(start: int, count: int) -> int:
    """Return the positions that `count` tokens attend to, of which `start` tokens precede the first."""
    return count * start + count * (count + 1) // 2


def measured_steps(trace: Trace) -> list[MeasuredStep]:
    """Return the steps of a recorded run.

    A step lasts from its plan to the next plan if a request goes on from one to the other, since the loop did not wait
    in between; else to its result.
    """
    return list(_measured(trace))


def _measured(trace: Trace) -> Iterator[MeasuredStep]:
    computed: dict[int, int] = {}
    open_plans: deque[Planned] = deque()
    last: tuple[StepWork, Planned, float] | None = None  # the step whose successor is not known
    for frame in trace.frames:
        if isinstance(frame, Ended):
            computed.pop(frame.number, None)
        elif isinstance(frame, Planned):
            if last is not None:
                goes_on = not set(last[1].numbers).isdisjoint(frame.numbers)
                yield MeasuredStep(last[0], (frame.now if goes_on else last[2]) - last[1].now)
                last = None
            if frame.numbers:
                open_plans.append(frame)
        elif isinstance(frame, Returned) and open_plans:
            plan = open_plans.popleft()
            if open_plans:
                raise ConfigError(
                    "step costs cannot be read from a run with --async-scheduling: its steps overlap"
                )
            last = (_returned_work(plan, frame, computed), plan, frame.now)
    if last is not None:
        yield MeasuredStep(last[0], last[2] - last[1].now)


def _returned_work(plan: Planned, result: Returned, computed: dict[int, int]) -> StepWork:
    """Return the work of a plan with its result, and record the computed tokens behind it."""
    computed.update(plan.starts)
    starts = [computed.get(number, 0) for number in plan.numbers]
    samples = [len(tokens) for tokens in result.sampled]
    passes = max(samples, default=1) or 1
    for number, start, count, sampled in zip(plan.numbers, starts, plan.num_tokens, samples, strict=True):
        computed[number] = start + count + max(sampled - 1, 0)
    return work_of(starts, plan.num_tokens, samples, passes)


def fit_costs(steps: Sequence[MeasuredStep]) -> PlanCosts:
    """Return the amounts of the least squared error, relative to the expected time, each at least 0.

    Raises:
        ConfigError: there are too few steps.
    """
    steps = [step for step in steps if step.seconds > 0.0]
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"step costs need a run of at least {MIN_STEPS} steps, and this one has {len(steps)}"
        )
    features = np.array([step.work.features() for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps], dtype=np.float64)
    # A step that was interrupted tells of other processes: the slowest hundredth of the first fit is left out.
    amounts = _non_negative(features, seconds, seconds)
    expected = np.maximum(features @ amounts, 1e-12)
    kept = seconds / expected <= np.quantile(seconds / expected, 0.99)
    # Relative to its own time a slow step counts less than a fast one, so sums of such a fit are too short.
    amounts = _non_negative(features[kept], seconds[kept], expected[kept])
    error = float(np.mean(np.abs(features[kept] @ amounts / seconds[kept] - 1.0)))
    fitted = dict(zip(AMOUNTS, map(float, amounts), strict=True))
    return PlanCosts(**fitted, error=error, num_steps=len(steps))


def _non_negative(
    features: NDArray[np.float64], seconds: NDArray[np.float64], scales: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Minimize |(features x - seconds) / scales|^2 over x >= 0 by an active set (Lawson and Hanson, 1974)."""
    weighted, sums = features / scales[:, None], seconds / scales
    scale = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)
    weighted = weighted / scale
    amounts, is_used = np.zeros(len(scale)), np.zeros(len(scale), dtype=np.bool_)
    for _ in range(MAX_CHANGES):
        slopes = np.where(is_used, 0.0, weighted.T @ (sums - weighted @ amounts))
        if slopes.max() <= MAX_SLOPE * len(seconds) ** 0.5:
            break
        is_used[slopes.argmax()] = True
        while (wanted := _fitted(weighted, sums, is_used)).min() < 0.0:
            falling = wanted < 0.0
            share = np.min(amounts[falling] / (amounts[falling] - wanted[falling]))
            amounts = np.maximum(amounts + share * (wanted - amounts), 0.0)
            is_used &= amounts > 0.0
        amounts = wanted
    fitted: NDArray[np.float64] = amounts / scale
    return fitted


def _fitted(
    weighted: NDArray[np.float64], sums: NDArray[np.float64], is_used: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the unrestricted optimum of the used amounts; the others are 0."""
    optimum = np.zeros(len(is_used))
    optimum[is_used] = np.linalg.lstsq(weighted[:, is_used], sums, rcond=None)[0]
    return optimum
