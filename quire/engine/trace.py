# SPDX-License-Identifier: Apache-2.0
"""Recorded runs: writing, reading and replaying scheduler traces.

A file is a magic line, then frames, each a four-byte length and a msgpack message. A frame is flushed before the next
event, so a crashed run is readable up to its last whole frame. The first frame is a `TraceHeader`; `TRACE_VERSION`
changes with any other.

`RecordedScheduler` is a proxy: callers see no difference, and every call that can change a plan is a frame. So any
loop and any scheduler class is recorded alike; internal actions of a scheduler are not events.

`replay` applies the recorded inputs to a new scheduler and records the outputs again; the two records are equal frame
by frame. A null executor checks that the plans can be executed as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from quire.config import EngineConfig, KVEventsConfig
from quire.engine.messages import EngineCoreRequest, message_of, request_of
from quire.errors import ConfigError, EngineError
from quire.executor.null import NullExecutor
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.prefix_loads import PrefixLoad
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, decode_kv_config, encode_kv_config
from quire.kv_cache.transfers import Transfer
from quire.media import MediaItem
from quire.scheduler.beams import request_id_of
from quire.scheduler.explain import Cause
from quire.scheduler.holds import Hold
from quire.scheduler.output import (
    STEP_PROTOCOL_VERSION,
    BlockIds,
    ModelRunnerOutput,
    Pooled,
    RequestUpdate,
    SchedulerOutput,
    TokenLogprobs,
)
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler, resolve_scheduler

logger = logging.getLogger(__name__)

TRACE_VERSION = 7
MAGIC = b"quire-trace\n"
LENGTH_BYTES = 4


class TraceHeader(msgspec.Struct, tag="header", frozen=True):
    """Everything that a scheduler is constructed from."""

    config: EngineConfig
    kv_config: dict[str, Any]
    version: int = TRACE_VERSION
    step_protocol_version: int = msgspec.field(default=STEP_PROTOCOL_VERSION, name="waist_version")


HoldData = tuple[str, str, str]  # (key, cause name, detail) of a hold


class Added(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Request was queued. Later frames refer to it, and to each row of its beams, by `number`; times are monotonic
    seconds.
    """

    now: float
    number: int
    request: EngineCoreRequest
    holds: list[HoldData] = []


class Held(msgspec.Struct, tag="hold", array_like=True, frozen=True):
    """Hold was added to a request, which may be running or unknown."""

    now: float
    request_id: str
    hold: HoldData


class Released(msgspec.Struct, tag="release", array_like=True, frozen=True):
    """Holds with this key were released."""

    now: float
    key: str


class Finished(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    """Requests were finished from outside; includes unknown ids."""

    now: float
    request_ids: list[str]
    reason: str


class Planned(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    """Plan: requests in order and their numbers of tokens; `digest` covers all the rest.

    `starts` maps requests without a row to their computed tokens.
    """

    now: float
    step_id: int
    numbers: list[int]
    num_tokens: list[int]
    starts: dict[int, int]
    new_block_ids: dict[int, BlockIds]
    removed: list[int]
    digest: bytes


class Returned(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """Result of a plan; `sampled` is in plan order, `failed` and `drafts` are keyed by position in the plan.

    Pooled output is omitted: it changes no plan. `logprobs` are of the beams of searches.
    """

    now: float
    step_id: int
    sampled: list[list[int]]
    failed: dict[int, str]
    forward_s: float
    sample_s: float
    drafts: dict[int, list[int]] = {}
    logprobs: dict[int, TokenLogprobs] = {}


class Ended(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """Request finished; `waits` are causes and nanoseconds, as in `explain`."""

    number: int
    finish_reason: str
    num_cached_tokens: int
    num_preemptions: int
    waits: list[tuple[str, int]]


class Reset(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Reset of the prefix cache was requested; `done`: whether it happened."""

    done: bool


class Paused(msgspec.Struct, tag="pause", array_like=True, frozen=True):
    """Engine was put to sleep, or into a deeper level."""

    now: float


class Forgot(msgspec.Struct, tag="forget", array_like=True, frozen=True):
    """KV cache was freed."""

    now: float


class Mixed(msgspec.Struct, tag="mix", array_like=True, frozen=True):
    """Other weights compute from now on, and requests keep what the old ones have computed."""

    now: float


class Resumed(msgspec.Struct, tag="resume", array_like=True, frozen=True):
    """Engine woke."""

    now: float


class LoadBegun(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """Host blocks were borrowed for what a store has of a request's prefix."""

    request_id: str
    stored: list[BlockHash]


class SavesBegun(msgspec.Struct, tag="save", array_like=True, frozen=True):
    """Host blocks with the content of these keys were borrowed, to be saved in a store."""

    keys: list[BlockHash]


class TransfersEnded(msgspec.Struct, tag="moved", array_like=True, frozen=True):
    """Borrowed host blocks, (block id, has moved), were given back."""

    moved: list[tuple[int, bool]]


# Frames after the header.
Frame = (
    Added
    | Held
    | Released
    | Finished
    | Planned
    | Returned
    | Ended
    | Reset
    | Paused
    | Forgot
    | Mixed
    | Resumed
    | LoadBegun
    | SavesBegun
    | TransfersEnded
)


class _TraceVersion(msgspec.Struct):
    version: int = 0


def create_trace(config: EngineConfig, kv_config: KVCacheConfig) -> TraceWriter | None:
    """Start the configured recording.

    An existing file is kept, and the name gets a number: it may hold a crashed run, or another replica's.

    Raises:
        ConfigError: the file cannot be made.
    """
    name = config.observability.record_trace
    if not name:
        return None
    file = _open_first(itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2))))
    logger.info("recording this run, with its prompts and answers, to %s", file.name)
    return TraceWriter(file, TraceHeader(config, encode_kv_config(kv_config)))


def _open_first(paths: Iterator[str]) -> BinaryIO:
    """Create the first of these files that does not exist, even if several replicas race."""
    for path in paths:
        try:
            return open(path, "xb", opener=_open_private)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"--record-trace: cannot write {path}: {error.strerror}") from None
    raise AssertionError("file names ran out")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class TraceWriter:
    """Writer of frames. A failing disk ends the recording with a log line, not the run."""

    def __init__(self, file: BinaryIO, header: TraceHeader) -> None:
        self._file = file
        self._encoder = msgspec.msgpack.Encoder()
        file.write(MAGIC)
        self.write(header)

    def write(self, frame: TraceHeader | Frame) -> None:
        """Append one frame; no effect once the file is closed."""
        if self._file.closed:
            return
        message = self._encoder.encode(frame)
        try:
            self._file.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
            self._file.flush()
        except OSError as error:
            logger.error("the recording ends here, the run goes on: %s", error)
            self.close()

    def close(self) -> None:
        """End the recording; may be called twice."""
        try:
            self._file.close()
        except OSError as error:  # buffered data could not be written
            logger.error("the end of the recording is lost: %s", error)


class Trace(msgspec.Struct, frozen=True):
    """Recorded run; `num_lost_bytes` belong to a truncated last frame."""

    header: TraceHeader
    frames: list[Frame]
    num_lost_bytes: int


def read_trace(path: Path) -> Trace:
    """Read a recorded run up to its last whole frame.

    Raises:
        ConfigError: the file cannot be read, is no recorded run, or is one of another version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    messages = list(_messages(data)) if data.startswith(MAGIC) else []
    if not messages:
        raise ConfigError(f"{path} is no recorded run")
    try:
        version = msgspec.msgpack.decode(messages[0], type=_TraceVersion).version
        if version != TRACE_VERSION:
            raise ConfigError(f"{path} is a recorded run of version {version}, not {TRACE_VERSION}")
        header = msgspec.msgpack.decode(messages[0], type=TraceHeader)
        decoder = msgspec.msgpack.Decoder(Frame)
        frames: list[Frame] = [decoder.decode(message) for message in messages[1:]]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    num_whole = len(MAGIC) + sum(LENGTH_BYTES + len(message) for message in messages)
    return Trace(header, frames, len(data) - num_whole)


def _messages(data: bytes) -> Iterator[bytes]:
    """Yield the whole messages after the magic line."""
    start = len(MAGIC)
    while start + LENGTH_BYTES <= len(data):
        begin = start + LENGTH_BYTES
        start = begin + int.from_bytes(data[start:begin], "little")
        if start > len(data):
            return
        yield data[begin:start]


DIGEST_BYTES = 16

_encoder = msgspec.msgpack.Encoder()


class FrameSink(Protocol):
    """Receiver of frames."""

    def write(self, frame: Frame) -> None: ...


def recorded(scheduler: Scheduler, sink: FrameSink) -> Scheduler:
    """Wrap a scheduler so that its events are recorded."""
    return cast(Scheduler, RecordedScheduler(scheduler, sink))


class RecordedScheduler:
    """Scheduler proxy that writes events to a sink; queries go straight to the scheduler."""

    def __init__(self, scheduler: Scheduler, sink: FrameSink) -> None:
        self._scheduler = scheduler
        self._write = sink.write
        self._numbers: dict[str, int] = {}  # of unfinished requests
        self._rows: dict[str, int] = {}  # of rows that the worker has
        self._searches: set[str] = set()  # unfinished requests with beams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def add_request(self, request: Request, now: float, holds: Iterable[Hold] = ()) -> None:
        holds = list(holds)
        self._scheduler.add_request(request, now, holds)
        self._numbers[request.request_id] = request.number
        if request.search is not None:
            self._searches.add(request.request_id)
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
        self._write(_returned(plan, output, now, self._searches))
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

    def mix(self, now: float) -> None:
        self._write(Mixed(now))
        self._scheduler.mix(now)

    def resume(self, now: float) -> None:
        self._write(Resumed(now))
        self._scheduler.resume(now)

    def begin_load(self, request_id: str, stored: Sequence[BlockHash]) -> PrefixLoad | None:
        self._write(LoadBegun(request_id, list(stored)))
        return self._scheduler.begin_load(request_id, stored)

    def begin_saves(self, keys: Sequence[BlockHash]) -> list[Transfer]:
        self._write(SavesBegun(list(keys)))
        return self._scheduler.begin_saves(keys)

    def end_transfers(self, moved: Sequence[tuple[int, bool]]) -> None:
        self._write(TransfersEnded(list(moved)))
        self._scheduler.end_transfers(moved)

    def _planned(self, plan: SchedulerOutput, now: float) -> Planned:
        removed = [self._rows.pop(name) for name in plan.removed_request_ids]
        self._rows.update(
            (data.request_id, self._numbers[request_id_of(data.request_id)]) for data in plan.new_requests
        )
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
        """Record the requests that finish with these updates."""
        for update in updates:
            if update.finish_reason is not None:
                self._write(self._ended(update, update.finish_reason, now))
        return updates

    def _ended(self, update: RequestUpdate, reason: str, now: float) -> Ended:
        explanation = self._scheduler.explain(update.request_id, now)
        self._searches.discard(update.request_id)
        return Ended(
            number=self._numbers.pop(update.request_id),
            finish_reason=reason,
            num_cached_tokens=update.num_cached_tokens,
            num_preemptions=update.num_preemptions,
            waits=[(share.cause, share.duration_ns) for share in explanation.shares] if explanation else [],
        )


def _data_of(hold: Hold) -> HoldData:
    assert isinstance(hold.key, str), "only the scheduler holds requests for other requests"
    return hold.key, hold.cause.name, hold.detail


def _returned(
    plan: SchedulerOutput, output: ModelRunnerOutput, now: float, searches: Collection[str]
) -> Returned:
    names = [request.request_id for request in plan.scheduled]
    sampled = [output.sampled_token_ids.get(name, []) for name in names]
    failed = {names.index(name): reason for name, reason in output.failed.items()}
    drafts = {names.index(name): tokens for name, tokens in output.draft_token_ids.items()}
    logprobs = {
        place: output.logprobs[name][0]
        for place, name in enumerate(names if searches else ())
        if name in output.logprobs and request_id_of(name) in searches
    }
    return Returned(now, plan.step_id, sampled, failed, output.forward_s, output.sample_s, drafts, logprobs)


class ReplayExecutor(NullExecutor):
    """Null executor that samples the recorded tokens."""

    def __init__(self, config: EngineConfig, specs: Mapping[str, KVCacheSpec]) -> None:
        super().__init__(config, specs=specs)
        self._sampled: dict[str, Iterator[int]] = {}
        self._decode_steps = 1

    def replay(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Execute a plan with its recorded output."""
        self._sampled = {name: iter(ids) for name, ids in output.sampled_token_ids.items()}
        self._decode_steps = max(map(len, output.sampled_token_ids.values()), default=1)
        self.execute_model(plan)

    def has_embeddings(self, item: MediaItem) -> bool:
        """Return True: encodings are not recorded, only the releases that followed them."""
        return True

    def _num_decode_steps(self, plan: SchedulerOutput) -> int:
        return self._decode_steps

    def _next_token(self, row: Any) -> int:
        return next(self._sampled.get(row.request_id, iter(())), 0)  # none for a failed request


class Replay:
    """Scheduler that replays a recorded one."""

    def __init__(self, trace: Trace) -> None:
        config = trace.header.config
        config = dataclasses.replace(config, kv_events=KVEventsConfig(), tells_cache=False)  # no subscriber
        kv_config = decode_kv_config(trace.header.kv_config)
        scheduler = resolve_scheduler(config.scheduler.scheduler_cls)(config, kv_config)
        self.made: deque[Frame] = deque()
        self._scheduler = recorded(scheduler, self)
        self._executor = ReplayExecutor(config, kv_config.layer_specs)
        self._executor.initialize_kv_cache(kv_config)
        self._in_flight: dict[int, SchedulerOutput] = {}

    def write(self, frame: Frame) -> None:
        """Record a frame; implements `FrameSink`."""
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

    def mix(self, frame: Mixed) -> None:
        self._scheduler.mix(frame.now)

    def resume(self, frame: Resumed) -> None:
        self._scheduler.resume(frame.now)

    def load(self, frame: LoadBegun) -> None:
        self._scheduler.begin_load(frame.request_id, frame.stored)

    def save(self, frame: SavesBegun) -> None:
        self._scheduler.begin_saves(frame.keys)

    def end_transfers(self, frame: TransfersEnded) -> None:
        self._executor.trust([block_id for block_id, has_moved in frame.moved if has_moved])
        self._scheduler.end_transfers(frame.moved)

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
    Mixed: Replay.mix,
    Resumed: Replay.resume,
    LoadBegun: Replay.load,
    SavesBegun: Replay.save,
    TransfersEnded: Replay.end_transfers,
    Planned: Replay.plan,
    Returned: Replay.result,
}  # Frame type -> action; an `Ended` frame needs none.


def replay(trace: Trace) -> Iterator[SchedulerOutput]:
    """Re-execute a recorded run; yields its plans.

    Raises:
        ConfigError: it was recorded with another plan version, or with a scheduler that is not there.
        EngineError: an output differs from the record; names the first difference.
    """
    if trace.header.step_protocol_version != STEP_PROTOCOL_VERSION:
        raise ConfigError(
            f"this run has plans of version {trace.header.step_protocol_version}, and of {STEP_PROTOCOL_VERSION} here"
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
        logprobs={names[place]: [entry] for place, entry in frame.logprobs.items()},
        failed=failed,
        draft_token_ids={names[place]: drafts for place, drafts in frame.drafts.items()},
        forward_s=frame.forward_s,
        sample_s=frame.sample_s,
        pooled={
            one.request_id: Pooled.from_array([])
            for one in plan.scheduled
            if one.pools and one.request_id not in failed
        },
    )
