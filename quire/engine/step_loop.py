# SPDX-License-Identifier: Apache-2.0
"""Step loops, plain and overlapped, with the same steps and results, so that one can be checked against the other.

Invariant: results are processed in the order of their plans. Between two iterations the scheduler may change in any way
(requests arrive or are aborted, the prefix cache is reset), whatever is in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from quire.config.scheduler import SchedulerConfig
from quire.executor.base import Executor
from quire.scheduler.output import RequestUpdate, SchedulerOutput
from quire.scheduler.scheduler import Scheduler

Clock = Callable[[], float]
"""Monotonic seconds; a simulator supplies its own."""


class StepLoop(Protocol):
    """Loop over a scheduler and an executor."""

    def step(self) -> list[RequestUpdate]:
        """Process the result of one step, if there is work, and return the requests' updates."""


class PlainLoop:
    """Loop of schedule -> execute -> update."""

    def __init__(self, scheduler: Scheduler, executor: Executor, clock: Clock = time.monotonic) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock

    def step(self) -> list[RequestUpdate]:
        plan = self._scheduler.schedule(self._clock())
        if plan.is_empty:
            return []
        with named_in_errors(plan):
            output = self._executor.execute_model(plan)
        return self._scheduler.update_from_output(plan, output, self._clock())


class OverlappedLoop:
    """Loop with up to `max_steps_in_flight` steps planned ahead of the results.

    While the executor computes a step, the host processes and publishes the previous one, and plans the next.
    A stop known only from a result (an end token) wastes the steps planned meanwhile; a limit on the number of tokens
    wastes none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        max_steps_in_flight: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._max_steps_in_flight = max_steps_in_flight
        self._in_flight: deque[SchedulerOutput] = deque()

    def step(self) -> list[RequestUpdate]:
        self._submit_steps()
        if not self._in_flight:
            return []
        plan = self._in_flight.popleft()
        with named_in_errors(plan):
            output = self._executor.collect()
        return self._scheduler.update_from_output(plan, output, self._clock())

    def _submit_steps(self) -> None:
        while len(self._in_flight) < self._max_steps_in_flight:
            plan = self._scheduler.schedule(self._clock())
            if plan.is_empty:
                return
            self._executor.submit(plan)
            self._in_flight.append(plan)


@contextmanager
def named_in_errors(plan: SchedulerOutput) -> Iterator[None]:
    """Add the step to the traceback of its failure, which the engine does not survive."""
    try:
        yield
    except Exception as error:
        new = [data.request_id for data in plan.new_requests]
        error.add_note(
            f"in step {plan.step_id}: tokens {plan.num_scheduled_tokens}, "
            f"of new requests {new}, removed {plan.removed_request_ids}"
        )
        raise


def make_loop(config: SchedulerConfig, scheduler: Scheduler, executor: Executor, clock: Clock) -> StepLoop:
    """Return the loop that `--async-scheduling` selects."""
    if config.async_scheduling:
        return OverlappedLoop(scheduler, executor, config.max_steps_in_flight, clock)
    return PlainLoop(scheduler, executor, clock)
