# SPDX-License-Identifier: Apache-2.0
"""Step costs: the work of plans against a plain count, and fits against costs that are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.trace import Planned
from quire.errors import ConfigError
from quire.simulate.costs import (
    AMOUNTS,
    BANDS,
    MeasuredStep,
    PlanCosts,
    StepWork,
    fit_costs,
    measured_steps,
    work_of,
)
from quire.simulate.load import LoadDescription, recorded_load
from quire.simulate.machine import machine_of
from tests.fixtures.folded import folded
from tests.simulate.machines import COSTS, RecordingSimulator, make_machine

ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.booleans()), min_size=1, max_size=5)


@given(ROWS, st.integers(1, 4))
def test_work_equals_plain_count(rows: list[tuple[int, int, bool]], passes: int) -> None:
    if passes > 1:  # only plans of one token per request have several passes
        rows = [(start, 1, True) for start, _, _ in rows]
    positions, prompt_positions, bands = 0, 0, [0] * (len(BANDS) + 1)
    for start, count, samples in rows:
        for place in range(start, start + count + passes - 1):
            if place >= start + count or (count == 1 and samples):
                positions += place + 1
            else:
                prompt_positions += place + 1
    for number in range(passes):
        for row in range(sum(count for _, count, _ in rows) if number == 0 else len(rows)):
            bands[sum(row >= end for end in BANDS)] += 1
    samples = [passes if samples else 0 for _, _, samples in rows]
    work = work_of([row[0] for row in rows], [row[1] for row in rows], samples, passes)
    assert work == StepWork(len(rows), passes, sum(samples), tuple(bands), positions, prompt_positions)


def random_work(generator: random.Random) -> StepWork:
    starts = [
        generator.choice((0, generator.randrange(2000)))
        for _ in range(generator.choice((1, 3, generator.randrange(1, 100))))
    ]
    counts = [generator.choice((1, generator.randrange(1, 100))) for _ in starts]
    samples = [generator.randrange(2) for _ in starts]
    passes = generator.randrange(1, 9) if max(counts) == 1 else 1
    return work_of(starts, counts, [passes * sampled for sampled in samples], passes)


@given(
    st.lists(st.floats(0.0, 0.01), min_size=len(AMOUNTS) - 1, max_size=len(AMOUNTS) - 1),
    st.integers(0, 2**32),
)
def test_fit_predicts_exact_steps(amounts: list[float], seed: int) -> None:
    generator = random.Random(seed)
    known = PlanCosts(0.001, *amounts)
    work = [random_work(generator) for _ in range(200)]
    fitted = fit_costs([MeasuredStep(one, known.seconds(one)) for one in work])
    for one in work:
        assert fitted.seconds(one) == pytest.approx(known.seconds(one), rel=0.02)


def test_fit_survives_interrupted_steps() -> None:
    generator = random.Random(1)
    work = [random_work(generator) for _ in range(500)]
    steps = [MeasuredStep(one, COSTS.seconds(one)) for one in work]
    steps[7] = MeasuredStep(work[7], 30.0)
    fitted = fit_costs(steps)
    assert fitted.seconds(work[0]) == pytest.approx(COSTS.seconds(work[0]), rel=0.01)


def test_fit_of_few_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 30 steps, and this one has 1"):
        fit_costs([MeasuredStep(work_of([0], [1], [1], 1), 0.1)])


@folded("name", AMOUNTS)
@folded("value", [-1.0, float("nan"), float("inf")])
def test_costs_below_zero_are_refused(name: str, value: float) -> None:
    given = dict.fromkeys(AMOUNTS, 1.0) | {name: value}
    with pytest.raises(ConfigError, match=name):
        PlanCosts(**given)


def test_costs_without_time_per_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="never end"):
        PlanCosts(0.0, 0.0, 0.0, 1.0, 0.0, *[1.0] * 7)


@pytest.mark.parametrize("steps", [1, 4])
def test_calibration_of_simulated_run_returns_its_costs(steps: int) -> None:
    machine = make_machine(num_scheduler_steps=steps)
    load = LoadDescription(40, 8.0, prompt_tokens="1-30", output_tokens="1-20").requests()
    simulator = RecordingSimulator(machine.config, machine)
    simulator.run(load)
    measured = measured_steps(simulator.trace)
    assert len(measured) == sum(
        isinstance(frame, Planned) and bool(frame.numbers) for frame in simulator.frames
    )
    for step in measured:
        assert step.seconds == pytest.approx(COSTS.seconds(step.work), rel=1e-6)
    assert machine_of(simulator.trace).costs.error < 0.01


def test_recorded_load_equals_its_load() -> None:
    machine = make_machine()
    load = LoadDescription(20, 8.0, prompt_tokens="1-30", output_tokens="1-20").requests()
    simulator = RecordingSimulator(machine.config, machine)
    simulator.run(load)
    found = recorded_load(simulator.trace)
    assert [(one.prompt_token_ids, one.num_output_tokens) for one in found] == [
        (one.prompt_token_ids, one.num_output_tokens) for one in load
    ]


def test_overlapped_run_cannot_be_calibrated() -> None:
    machine = make_machine(async_scheduling=True, max_steps_in_flight=2)
    simulator = RecordingSimulator(machine.config, machine)
    simulator.run(LoadDescription(10, prompt_tokens="4", output_tokens="9").requests())
    with pytest.raises(ConfigError, match="async-scheduling"):
        measured_steps(simulator.trace)
