"""What crosses hosts for a replica that runs on another one than the server: frames over a TCP connection of its own.

Invariant: msgspec structs, never pickle. The messages of a core and its front end cross as they are, but for their
times, which each host counts on a clock of its own.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from quire.config import EngineConfig
from quire.engine.messages import (
    NO_MESSAGE,
    WIRE_VERSION,
    AddRequest,
    CoreMessage,
    CoreRequest,
    EngineCoreOutputs,
)
from quire.kernels.cpu.instruction_sets import arithmetic
from quire.models.facts import model_of, options_of
from quire.version import __version__

OF_EACH_PART = frozenset(
    {
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_size_local",
        "data_parallel_start_rank",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "swap_space",
    }
)
"""Fields that hosts with replicas may have apart, beside those of each host.

By what name they reach the server, which replicas they have, and what memory.
"""


class ReplicaHello(msgspec.Struct, tag="replica", frozen=True):
    """Who wants to join; all but the number and the time must be the server's."""

    replica: int
    now: float
    """The host's monotonic clock, in seconds."""
    facts: dict[str, bytes]
    version: str = __version__
    wire_version: int = WIRE_VERSION
    arithmetic: str = ""
    """By what it computes, where its bits depend on that; it need not be what the server's own computes by."""


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """The replica's host is there; `stalls`: its core does not seem to go on."""

    stalls: bool


class CoreLost(msgspec.Struct, tag="lost", frozen=True):
    """The core has died; `in_work` are digests of the requests that it was working on (`progress.digest`)."""

    message: str
    in_work: list[bytes]


FromReplica = CoreMessage | Alive | CoreLost
Message = TypeVar("Message")


def facts_of(config: EngineConfig) -> dict[str, bytes]:
    """A digest of each thing that a server and its replicas of other hosts must have in common."""
    facts = options_of(config, OF_EACH_PART) | model_of(config)
    return {name: sha256(fact).digest()[:8] for name, fact in facts.items()}


def arithmetic_of(config: EngineConfig) -> str:
    """What replicas on this host compute by, as far as it depends on the host; empty: it does not."""
    return arithmetic() if config.device.device == "cpu" else ""


class Wire:
    """One end: any thread may send, one receives, and any may close.

    Every call raises OSError or EOFError where the other end is gone.
    """

    def __init__(self, way: socket.socket) -> None:
        self._way = way
        self._connection = Connection(os.dup(way.fileno()))
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()

    def send(self, message: CoreRequest | FromReplica) -> None:
        """Wait until the message is on its way."""
        frame = self._encoder.encode(message)
        with self._sending:
            self._connection.send_bytes(frame)

    def poll(self, seconds: float) -> bool:
        """Whether there is something to receive within this time."""
        return self._connection.poll(seconds)

    def receive(self) -> bytes:
        """The next frame."""
        return self._connection.recv_bytes()

    def close(self) -> None:
        """Have both ends find this closed, from any thread."""
        with suppress(OSError):
            self._way.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close, and let go; twice is fine. Only who receives may do so."""
        self.close()
        with self._sending:
            self._way.close()
            self._connection.close()


class BadFrameError(Exception):
    """What came is no message."""


def decoded(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    """The message that a frame is; raises BadFrameError if it is none."""
    try:
        return decoder.decode(frame)
    except NO_MESSAGE as error:
        raise BadFrameError(f"a frame of {len(frame)} bytes is no message: {error}") from error


def sent_to(message: CoreRequest, ahead_s: float) -> CoreRequest:
    """A message for a core whose clock is so much behind this one's."""
    if not isinstance(message, AddRequest):
        return message
    request = message.request
    moved = msgspec.structs.replace(request, arrival_time=request.arrival_time - ahead_s)
    return msgspec.structs.replace(message, request=moved)


def heard_from(message: CoreMessage, ahead_s: float) -> CoreMessage:
    """What such a core says, in this host's time; 0.0 means that something has not happened."""
    if not isinstance(message, EngineCoreOutputs):
        return message
    for update in message.updates:
        update.queued_ts += ahead_s if update.queued_ts else 0.0
        update.scheduled_ts += ahead_s if update.scheduled_ts else 0.0
    return msgspec.structs.replace(message, timestamp=message.timestamp + ahead_s)
