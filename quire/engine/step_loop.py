"""The step loop, plain and overlapped: the same steps with the same results, side by side so that one can be
checked against the other.

Invariant: results are taken in in the order of their plans. Between two turns anything may happen to the scheduler
(requests come, are aborted, the prefix cache is reset), whatever is in flight.
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
"""Seconds, never going back; a simulator brings its own."""


class StepLoop(Protocol):
    """Joins a scheduler and an executor."""

    def step(self) -> list[RequestUpdate]:
        """Take in the result of one step, if there is work; returns what it meant for each request."""


class PlainLoop:
    """schedule -> execute -> update."""

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
    """The same with up to `max_steps_in_flight` steps planned ahead of the results.

    While the executor computes a step, the host takes in the one before it, publishes that, and plans the next.
    A stop that only a result can tell (an end token) costs the steps that were planned meanwhile; a limit on the
    number of tokens costs none.
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
    """Say in the traceback of a step that fails which it was; the engine does not survive it."""
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
    """The loop that `--async-scheduling` chooses."""
    if config.async_scheduling:
        return OverlappedLoop(scheduler, executor, config.max_steps_in_flight, clock)
    return PlainLoop(scheduler, executor, clock)
