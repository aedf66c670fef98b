"""`RecordedScheduler`: stands in for a scheduler, passes every event on to it, and writes down what happened.

Invariant: whoever calls a scheduler sees no difference, and every call that can change a plan is a frame. So any loop
and any scheduler class is recorded alike; what a scheduler does to itself is not an event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol, cast

import msgspec

from quire.engine.messages import message_of
from quire.engine.trace import (
    Added,
    Ended,
    Finished,
    Forgot,
    Frame,
    Held,
    HoldData,
    Paused,
    Planned,
    Released,
    Reset,
    Resumed,
    Returned,
)
from quire.scheduler.holds import Hold
from quire.scheduler.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler

DIGEST_BYTES = 16

_encoder = msgspec.msgpack.Encoder()


class FrameSink(Protocol):
    """Where frames go."""

    def write(self, frame: Frame) -> None: ...


def recorded(scheduler: Scheduler, sink: FrameSink) -> Scheduler:
    """The same scheduler, with a witness."""
    return cast(Scheduler, RecordedScheduler(scheduler, sink))


class RecordedScheduler:
    """Writes events to a sink; questions go straight to the scheduler."""

    def __init__(self, scheduler: Scheduler, sink: FrameSink) -> None:
        self._scheduler = scheduler
        self._write = sink.write
        self._numbers: dict[str, int] = {}  # of unfinished requests
        self._rows: dict[str, int] = {}  # of requests for which the worker has a row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def add_request(self, request: Request, now: float, holds: Iterable[Hold] = ()) -> None:
        holds = list(holds)
        self._scheduler.add_request(request, now, holds)
        self._numbers[request.request_id] = request.number
        self._write(Added(now, request.number, message_of(request), [_data_of(hold) for hold in holds]))

    def hold(self, request_id: str, hold: Hold, now: float) -> bool:
        self._write(Held(now, request_id, _data_of(hold)))
        return self._scheduler.hold(request_id, hold, now)

    def release(self, key: str, now: float) -> None:
        self._write(Released(now, key))
        self._scheduler.release(key, now)

    def finish_requests(self, request_ids: Iterable[str], reason: str, now: float) -> list[RequestUpdate]:
        request_ids = list(request_ids)
        self._write(Finished(now, request_ids, reason))
        return self._with_ends(self._scheduler.finish_requests(request_ids, reason, now), now)

    def schedule(self, now: float) -> SchedulerOutput:
        plan = self._scheduler.schedule(now)
        self._write(self._planned(plan, now))
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float
    ) -> list[RequestUpdate]:
        self._write(_returned(plan, output, now))
        return self._with_ends(self._scheduler.update_from_output(plan, output, now), now)

    def reset_prefix_cache(self) -> bool:
        done = self._scheduler.reset_prefix_cache()
        self._write(Reset(done))
        return done

    def pause(self, now: float) -> None:
        self._write(Paused(now))
        self._scheduler.pause(now)

    def forget(self, now: float) -> None:
        self._write(Forgot(now))
        self._scheduler.forget(now)

    def resume(self, now: float) -> None:
        self._write(Resumed(now))
        self._scheduler.resume(now)

    def _planned(self, plan: SchedulerOutput, now: float) -> Planned:
        removed = [self._rows.pop(name) for name in plan.removed_request_ids]
        self._rows.update((data.request_id, self._numbers[data.request_id]) for data in plan.new_requests)
        blocks = [(data.request_id, data.block_ids) for data in plan.new_requests]
        blocks += [
            (request.request_id, request.new_block_ids)
            for request in plan.scheduled
            if any(request.new_block_ids)
        ]
        return Planned(
            now=now,
            step_id=plan.step_id,
            numbers=[self._rows[request.request_id] for request in plan.scheduled],
            num_tokens=[request.num_tokens for request in plan.scheduled],
            starts={self._rows[data.request_id]: data.num_computed_tokens for data in plan.new_requests},
            new_block_ids={self._rows[name]: ids for name, ids in blocks},
            removed=removed,
            digest=hashlib.blake2b(_encoder.encode(plan), digest_size=DIGEST_BYTES).digest(),
        )

    def _with_ends(self, updates: list[RequestUpdate], now: float) -> list[RequestUpdate]:
        """Write down the requests that end with these updates."""
        for update in updates:
            if update.finish_reason is not None:
                self._write(self._ended(update, update.finish_reason, now))
        return updates

    def _ended(self, update: RequestUpdate, reason: str, now: float) -> Ended:
        explanation = self._scheduler.explain(update.request_id, now)
        return Ended(
            number=self._numbers.pop(update.request_id),
            finish_reason=reason,
            num_cached_tokens=update.num_cached_tokens,
            num_preemptions=update.num_preemptions,
            waits=[(share.cause, share.duration_ns) for share in explanation.shares] if explanation else [],
        )


def _data_of(hold: Hold) -> HoldData:
    assert isinstance(hold.key, str), "only the scheduler itself holds requests for others"
    return hold.key, hold.cause.name, hold.detail


def _returned(plan: SchedulerOutput, output: ModelRunnerOutput, now: float) -> Returned:
    names = [request.request_id for request in plan.scheduled]
    sampled = [output.sampled_token_ids.get(name, []) for name in names]
    failed = {names.index(name): reason for name, reason in output.failed.items()}
    drafts = {names.index(name): tokens for name, tokens in output.draft_token_ids.items()}
    return Returned(now, plan.step_id, sampled, failed, output.forward_s, output.sample_s, drafts)
