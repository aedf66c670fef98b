"""`replay`: do to a fresh scheduler what was done to the recorded one, and get the same plans.

Invariant: what comes in is taken from the record, what comes out is recorded again, and the two records are equal
frame by frame; a null executor checks that the plans can be executed as well.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.config import EngineConfig, KVEventsConfig
from quire.engine.messages import request_of
from quire.engine.recorder import recorded
from quire.engine.trace import (
    Added,
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
    Trace,
)
from quire.errors import ConfigError, EngineError
from quire.executor.null import NullExecutor
from quire.kv_cache.plain import decode_kv_config
from quire.kv_cache.spec import KVCacheSpec
from quire.scheduler.explain import Cause
from quire.scheduler.holds import Hold
from quire.scheduler.output import WAIST_VERSION, ModelRunnerOutput, Pooled, SchedulerOutput
from quire.scheduler.scheduler import resolve_scheduler


class ReplayExecutor(NullExecutor):
    """A null executor that samples what was sampled."""

    def __init__(self, config: EngineConfig, specs: Mapping[str, KVCacheSpec]) -> None:
        super().__init__(config, specs=specs)
        self._sampled: dict[str, Iterator[int]] = {}
        self._rounds = 1

    def replay(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Execute a plan that once had this output."""
        self._sampled = {name: iter(ids) for name, ids in output.sampled_token_ids.items()}
        self._rounds = max(map(len, output.sampled_token_ids.values()), default=1)
        self.execute_model(plan)

    def _num_rounds(self, plan: SchedulerOutput) -> int:
        return self._rounds

    def _next_token(self, row: Any) -> int:
        return next(self._sampled.get(row.request_id, iter(())), 0)  # nothing where it failed


class Replay:
    """A scheduler in the place of the recorded one."""

    def __init__(self, trace: Trace) -> None:
        config = trace.header.config
        config = dataclasses.replace(config, kv_events=KVEventsConfig(), tells_cache=False)  # nobody listens
        kv_config = decode_kv_config(trace.header.kv_config)
        scheduler = resolve_scheduler(config.scheduler.scheduler_cls)(config, kv_config)
        self.made: deque[Frame] = deque()
        self._scheduler = recorded(scheduler, self)
        self._executor = ReplayExecutor(config, kv_config.layer_specs)
        self._executor.initialize_kv_cache(kv_config)
        self._in_flight: dict[int, SchedulerOutput] = {}

    def write(self, frame: Frame) -> None:
        """A sink of frames, for the recorder."""
        self.made.append(frame)

    def add(self, frame: Added) -> None:
        self._scheduler.add_request(request_of(frame.request), frame.now, map(_hold_of, frame.holds))

    def hold(self, frame: Held) -> None:
        self._scheduler.hold(frame.request_id, _hold_of(frame.hold), frame.now)

    def release(self, frame: Released) -> None:
        self._scheduler.release(frame.key, frame.now)

    def finish(self, frame: Finished) -> None:
        self._scheduler.finish_requests(frame.request_ids, frame.reason, frame.now)

    def reset(self, _: Reset) -> None:
        self._scheduler.reset_prefix_cache()

    def pause(self, frame: Paused) -> None:
        self._scheduler.pause(frame.now)

    def forget(self, frame: Forgot) -> None:
        self._scheduler.forget(frame.now)

    def resume(self, frame: Resumed) -> None:
        self._scheduler.resume(frame.now)

    def plan(self, frame: Planned) -> SchedulerOutput:
        plan = self._scheduler.schedule(frame.now)
        self._in_flight[plan.step_id] = plan
        return plan

    def result(self, frame: Returned) -> None:
        plan = self._in_flight.pop(frame.step_id)
        output = _output(frame, plan)
        self._executor.replay(plan, output)
        self._scheduler.update_from_output(plan, output, frame.now)


EVENTS: dict[type, Callable[[Replay, Any], SchedulerOutput | None]] = {
    Added: Replay.add,
    Held: Replay.hold,
    Released: Replay.release,
    Finished: Replay.finish,
    Reset: Replay.reset,
    Paused: Replay.pause,
    Forgot: Replay.forget,
    Resumed: Replay.resume,
    Planned: Replay.plan,
    Returned: Replay.result,
}
"""What to do about a frame; an `Ended` just follows."""


def replay(trace: Trace) -> Iterator[SchedulerOutput]:
    """Re-execute a recorded run; yields its plans.

    Raises:
        ConfigError: it was recorded with other plans than this version makes, or with a scheduler that is not there.
        EngineError: something came out that is not what was recorded; names the first difference.
    """
    if trace.header.waist_version != WAIST_VERSION:
        raise ConfigError(
            f"the plans of this run are of version {trace.header.waist_version}, and of {WAIST_VERSION} here"
        )
    run = Replay(trace)
    for place, frame in enumerate(trace.frames):
        plan = EVENTS[type(frame)](run, frame) if type(frame) in EVENTS else None
        made = run.made.popleft() if run.made else None
        if made != frame:
            raise EngineError(f"frame {place} was {frame}, and the replay gives {made}")
        if plan is not None:
            yield plan


def _hold_of(data: HoldData) -> Hold:
    key, cause, detail = data
    return Hold(key, Cause[cause], detail)


def _output(frame: Returned, plan: SchedulerOutput) -> ModelRunnerOutput:
    names = [request.request_id for request in plan.scheduled]
    sampled = {name: ids for name, ids in zip(names, frame.sampled, strict=True) if ids}
    failed = {names[place]: reason for place, reason in frame.failed.items()}
    return ModelRunnerOutput(
        frame.step_id,
        sampled,
        failed=failed,
        draft_token_ids={names[place]: drafts for place, drafts in frame.drafts.items()},
        forward_s=frame.forward_s,
        sample_s=frame.sample_s,
        pooled={
            one.request_id: Pooled.of([])
            for one in plan.scheduled
            if one.pools and one.request_id not in failed
        },
    )
