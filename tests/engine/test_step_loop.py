# SPDX-License-Identifier: Apache-2.0
"""Both step loops over a scheduler and a null executor: depth of the pipeline, errors of failed steps."""

from __future__ import annotations

import pytest

from quire.engine.step_loop import OverlappedLoop, PlainLoop, StepLoop
from quire.executor.null import NullExecutor
from quire.sampling_params import SamplingParams
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.harness import make_config, make_kv_config


class Rig:
    """A loop, with the executor's calls written down."""

    def __init__(self, max_steps_in_flight: int) -> None:
        config = make_config()
        kv_config = make_kv_config(config)
        self.calls: list[str] = []
        self.executor = ListeningExecutor(config, specs=kv_config.layer_specs, vocab_size=40)
        self.executor.calls = self.calls
        self.executor.initialize_kv_cache(kv_config)
        self.scheduler = Scheduler(config, kv_config)
        self.loop: StepLoop = PlainLoop(self.scheduler, self.executor)
        if max_steps_in_flight:
            self.loop = OverlappedLoop(self.scheduler, self.executor, max_steps_in_flight)

    def add(self, name: str, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(request_id=name, prompt_token_ids=[1, 2, 3], sampling_params=params)
        self.scheduler.add_request(request, 0.0)

    def run(self) -> list[int]:
        tokens = []
        while self.scheduler.has_work():
            tokens += [token for update in self.loop.step() for token in update.new_token_ids]
        return tokens


class ListeningExecutor(NullExecutor):
    calls: list[str]

    def submit(self, plan: SchedulerOutput) -> None:
        self.calls.append(f"+{plan.step_id}")
        super().submit(plan)

    def collect(self) -> ModelRunnerOutput:
        output = super().collect()
        self.calls.append(f"-{output.step_id}")
        return output


@pytest.mark.parametrize(
    ("max_steps_in_flight", "calls"),
    [
        (0, "+1 -1 +2 -2 +3 -3 +4 -4"),
        (1, "+1 -1 +2 -2 +3 -3 +4 -4"),
        (2, "+1 +2 -1 +3 -2 -3 +5 -5"),
        (3, "+1 +2 +3 -1 -2 -3 +6 -6"),
    ],
)
def test_steps_are_submitted_ahead_and_collected_in_order(max_steps_in_flight: int, calls: str) -> None:
    """The last step frees the row; plans that would be empty are counted and not submitted."""
    rig, plain = Rig(max_steps_in_flight), Rig(0)
    rig.add("a", max_tokens=3)
    plain.add("a", max_tokens=3)
    assert rig.run() == plain.run()
    assert " ".join(rig.calls) == calls


@pytest.mark.parametrize("max_steps_in_flight", [0, 1, 2, 4])
def test_without_work_a_turn_does_nothing(max_steps_in_flight: int) -> None:
    rig = Rig(max_steps_in_flight)
    assert rig.loop.step() == []
    assert rig.calls == []


@pytest.mark.parametrize("max_steps_in_flight", [0, 2, 4])
def test_a_step_that_fails_ends_the_loop_and_is_named(max_steps_in_flight: int) -> None:
    rig = Rig(max_steps_in_flight)
    rig.add("a", max_tokens=9)
    rig.loop.step()
    rig.executor._rows.clear()
    with pytest.raises(AssertionError, match="a is not new and has no row") as caught:
        rig.loop.step()
    assert caught.value.__notes__ == ["in step 2: tokens {'a': 1}, of new requests [], removed []"]
