# SPDX-License-Identifier: Apache-2.0
"""Steps that are timed before the first request: which, how many, and that nothing else is left of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from quire.executor.null import NullExecutor
from quire.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec, RecurrentStateSpec, fit_states
from quire.models.stages import ALL
from quire.scheduler.output import SchedulerOutput
from quire.spec_decode.drafter import Draft, Text
from quire.spec_decode.speculation import Speculation
from quire.spec_decode.step_costs import OwnClock, StepCosts
from quire.spec_decode.worker.calibration import NUM_TIMED, Calibration, is_calibrated, shapes_of
from quire.spec_decode.worker.drafting import DraftingPart
from quire.worker.calibration import rehearsed_groups
from tests.spec_decode.manual_clocks import ManualClocks
from tests.worker.harness import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    VOCAB_SIZE,
    Driver,
    SamplingParams,
    tiny_config,
    toy_runner,
)

AUTO = {"speculative_config": {"method": "auto"}}
FULL = FullAttentionSpec(BLOCK_SIZE, 1, 1, 4)
STATE = RecurrentStateSpec(BLOCK_SIZE, 96)


def cache_of(*layers: KVCacheSpec, num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    specs = fit_states({f"layer {index}": spec for index, spec in enumerate(layers)})
    return KVCacheConfig(num_blocks, rehearsed_groups(specs), specs)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, [(1, 0), (1, 8), (1, 4), (1, 2), (1, 1), (8, 0), (8, 1), (8, 4)]),
        ({"max_num_batched_tokens": 8}, [(1, 0), (1, 4), (1, 2), (1, 1), (8, 0)]),
        ({"max_num_seqs": 1, "max_model_len": 4}, [(1, 0), (1, 3), (1, 1)]),
        ({"max_num_seqs": 3, "max_model_len": 2}, [(1, 0), (1, 1), (3, 0), (3, 1)]),
    ],
    ids=str,
)
def test_shapes_are_within_all_limits(args: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    assert shapes_of(tiny_config(**AUTO, **args)) == expected


def test_stages_and_processors_of_an_operator_are_left_alone() -> None:
    assert is_calibrated(tiny_config(**AUTO), ALL)
    assert not is_calibrated(tiny_config(**AUTO), dataclasses.replace(ALL, of=2))
    assert not is_calibrated(tiny_config(**AUTO, logits_processors=["module:Class"]), ALL)


@pytest.mark.parametrize("layers", [[FULL], [FULL, STATE]], ids=["attention", "states"])
def test_steps_keep_every_promise_of_a_plan(layers: list[KVCacheSpec]) -> None:
    config, cache = tiny_config(**AUTO), cache_of(*layers)
    executor = NullExecutor(
        dataclasses.replace(config, model_arch=None), specs=cache.layer_specs, vocab_size=VOCAB_SIZE
    )
    executor.initialize_kv_cache(cache)

    def run(plan: SchedulerOutput) -> float:
        assert not executor.execute_model(plan).failed
        return 0.0

    Calibration(shapes_of(config), cache).run(run, StepCosts())


def test_fastest_step_of_a_width_counts_and_first_of_a_shape_not() -> None:
    """By a clock that tells of a step that is held up every now and then."""
    ran, costs = list[int](), StepCosts()

    def run(plan: SchedulerOutput) -> float:
        width = plan.total_num_scheduled_tokens
        ran.append(width)
        is_first = ran.count(width) == 1
        return 1e-9 if is_first else 1e-3 * width * (1 + len(ran) % 3)

    Calibration([(1, 0), (1, 3)], cache_of(FULL)).run(run, costs, budget_s=1.0)
    assert ran == [1, 1, 4, 4, 1, 4, 0]
    assert costs.of(1) == pytest.approx(1e-3 * 1 * 3)
    assert costs.of(4) == pytest.approx(1e-3 * 4 * 1)
    assert NUM_TIMED == 2


@pytest.mark.parametrize("step_s", [0.001, 0.04, 1.0])
def test_no_step_is_begun_when_time_is_over(step_s: float) -> None:
    clock, began = [0.0], list[float]()

    def run(plan: SchedulerOutput) -> float:
        if plan.scheduled:
            began.append(clock[0])
        clock[0] += step_s
        return step_s

    Calibration([(1, 0), (1, 3), (1, 1)], cache_of(FULL)).run(run, StepCosts(), budget_s=0.3)
    assert len(began) == min(9, max(1, round(0.3 / step_s + 0.49)))
    assert max(began) < 0.3


def test_shapes_that_the_cache_has_no_room_for_are_left_out() -> None:
    ran = list[int]()

    def run(plan: SchedulerOutput) -> float:
        ran.append(plan.total_num_scheduled_tokens)
        return 0.0

    Calibration([(1, 0), (1, 4), (3, 0)], cache_of(FULL, num_blocks=3)).run(run, StepCosts())
    assert set(ran) == {1, 5, 0}


class RecordingDrafter:
    """Drafter that records its calls."""

    keys = frozenset[str]()

    def __init__(self) -> None:
        self.names: list[str] = []

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        self.names += [text.request_id for text in texts]
        return [Draft([])] * len(texts)

    def forget(self, request_id: str) -> None:
        self.names.append(request_id)


@pytest.mark.parametrize("adaptive", [True, False])
def test_nothing_is_left_behind_but_costs(adaptive: bool) -> None:
    drafter, clocks = RecordingDrafter(), ManualClocks()
    runner = toy_runner(**AUTO)
    speculation = Speculation({"asked": drafter}, adaptive=adaptive, clocks=clocks)
    (part,) = runner.parts
    assert isinstance(part, DraftingPart)
    part.speculation, part.clocks = speculation, OwnClock()
    part.calibration = Calibration([(1, 0), (1, 3), (2, 1)], cache_of(FULL))
    runner.calibrate()
    costs = speculation._costs
    assert [width for width in range(9) if costs.is_known(width)] == ([1, 4] if adaptive else [])
    assert not drafter.names
    assert len(runner.batch) == 0

    fresh = Driver(toy_runner(**AUTO))
    used = Driver(runner)
    for driver in (fresh, used):
        driver.submit("a", [5, 6, 7], SamplingParams(seed=3, logprobs=2))
    sequences = [driver.generate("a", 12) for driver in (fresh, used)]
    assert sequences[0].output == sequences[1].output
    assert sequences[0].logprobs == sequences[1].logprobs
    assert set(drafter.names) == {"a"}
