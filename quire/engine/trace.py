"""The file of a recorded run: a magic line, then frames, each a length of four bytes and a msgpack message.

Invariant: a frame is on its way to the disk before the next event happens, so a run that crashed can be read up to its
last whole frame. The first frame is a `Header`; `TRACE_VERSION` changes with any other.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.config import EngineConfig
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError
from quire.kv_cache.plain import encode_kv_config
from quire.kv_cache.spec import KVCacheConfig
from quire.scheduler.output import WAIST_VERSION, BlockIds

logger = logging.getLogger(__name__)

TRACE_VERSION = 4
MAGIC = b"quire-trace\n"
LENGTH_BYTES = 4


class Header(msgspec.Struct, tag="header", frozen=True):
    """All that a scheduler is made of."""

    config: EngineConfig
    kv_config: dict[str, Any]
    version: int = TRACE_VERSION
    waist_version: int = WAIST_VERSION


HoldData = tuple[str, str, str]
"""A hold: its key, the name of its cause, its detail."""


class Added(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A request was queued. Later frames call it by `number`, and times are monotonic seconds.

    A beam takes over the number of one that has ended.
    """

    now: float
    number: int
    request: EngineCoreRequest
    holds: list[HoldData] = []


class Held(msgspec.Struct, tag="hold", array_like=True, frozen=True):
    """A request came to wait for something more, or it was running or unknown."""

    now: float
    request_id: str
    hold: HoldData


class Released(msgspec.Struct, tag="release", array_like=True, frozen=True):
    """What holds with this key waited for was there."""

    now: float
    key: str


class Finished(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    """Requests were ended from outside; unknown ones are among them, as the scheduler was told."""

    now: float
    request_ids: list[str]
    reason: str


class Planned(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    """A plan: requests, in its order, and how many tokens of each; `digest` stands for all the rest of it.

    `starts` has the requests that came without a row, and how many of their tokens were computed already.
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
    """The result of a plan; `sampled` is in the plan's order, `failed` and `drafts` have positions in it.

    What was pooled is left out: it changes no plan.
    """

    now: float
    step_id: int
    sampled: list[list[int]]
    failed: dict[int, str]
    forward_s: float
    sample_s: float
    drafts: dict[int, list[int]] = {}


class Ended(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """A request is over; `waits` are causes and nanoseconds, as `explain` gives them."""

    number: int
    finish_reason: str
    num_cached_tokens: int
    num_preemptions: int
    waits: list[tuple[str, int]]


class Reset(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Somebody wanted the prefix cache to be forgotten, and whether it was."""

    done: bool


class Paused(msgspec.Struct, tag="pause", array_like=True, frozen=True):
    """The engine fell asleep, or deeper."""

    now: float


class Forgot(msgspec.Struct, tag="forget", array_like=True, frozen=True):
    """The KV cache was given back."""

    now: float


class Resumed(msgspec.Struct, tag="resume", array_like=True, frozen=True):
    """The engine woke."""

    now: float


Frame = Added | Held | Released | Finished | Planned | Returned | Ended | Reset | Paused | Forgot | Resumed
"""What follows the header."""


class _Version(msgspec.Struct):
    version: int = 0


def create_trace(config: EngineConfig, kv_config: KVCacheConfig) -> TraceWriter | None:
    """Begin the recording that the config asks for.

    A file that exists is kept, and the name gets a number: it may hold the run that crashed, or another replica's.

    Raises:
        ConfigError: the file cannot be made.
    """
    name = config.observability.record_trace
    if not name:
        return None
    file = _open_first(itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2))))
    logger.info("recording this run, with its prompts and answers, to %s", file.name)
    return TraceWriter(file, Header(config, encode_kv_config(kv_config)))


def _open_first(paths: Iterator[str]) -> BinaryIO:
    """The first of these that is not there yet, however many replicas open theirs at once."""
    for path in paths:
        try:
            return open(path, "xb", opener=_open_private)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"--record-trace: cannot write {path}: {error.strerror}") from None
    raise AssertionError("there is always another name")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class TraceWriter:
    """Appends frames. A disk that fails ends the recording, which is logged, and not the run."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self._file = file
        self._encoder = msgspec.msgpack.Encoder()
        file.write(MAGIC)
        self.write(header)

    def write(self, frame: Header | Frame) -> None:
        """Append one frame; nothing once the file is closed."""
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
        """End the recording; calling it twice is fine."""
        try:
            self._file.close()
        except OSError as error:  # what could not be written before cannot be written now
            logger.error("the end of the recording is lost: %s", error)


class Trace(msgspec.Struct, frozen=True):
    """A recorded run; `num_lost_bytes` belong to a frame of which the end is missing."""

    header: Header
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
        version = msgspec.msgpack.decode(messages[0], type=_Version).version
        if version != TRACE_VERSION:
            raise ConfigError(f"{path} is a recorded run of version {version}, not {TRACE_VERSION}")
        header = msgspec.msgpack.decode(messages[0], type=Header)
        decoder = msgspec.msgpack.Decoder(Frame)
        frames: list[Frame] = [decoder.decode(message) for message in messages[1:]]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    num_whole = len(MAGIC) + sum(LENGTH_BYTES + len(message) for message in messages)
    return Trace(header, frames, len(data) - num_whole)


def _messages(data: bytes) -> Iterator[bytes]:
    """The whole messages after the magic line."""
    start = len(MAGIC)
    while start + LENGTH_BYTES <= len(data):
        begin = start + LENGTH_BYTES
        start = begin + int.from_bytes(data[start:begin], "little")
        if start > len(data):
            return
        yield data[begin:start]
