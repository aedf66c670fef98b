# SPDX-License-Identifier: Apache-2.0
"""Wire between a server and a replica on another host: frames over a TCP connection.

Invariant: msgspec structs, never pickle. Core messages cross unchanged except for their times, which are converted
between the hosts' clocks.
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
from quire.models.identity import model_of, options_of
from quire.version import __version__

PER_REPLICA_FIELDS = frozenset(
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
"""Fields in which replica hosts may differ from the server, beside per-host ones: addresses, replica numbers, memory.
"""


class ReplicaHello(msgspec.Struct, tag="replica", frozen=True):
    """Join request of a replica; all but the number and the time must equal the server's."""

    replica: int
    now: float  # Host's monotonic clock, in seconds.
    facts: dict[str, bytes]
    version: str = __version__
    wire_version: int = WIRE_VERSION
    arithmetic: str = ""  # Arithmetic on which its bits depend; may differ from the server's.


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """Sign of life of a replica's host; `stalls`: its core seems to hang."""

    stalls: bool


class ReplicaCoreLost(msgspec.Struct, tag="lost", frozen=True):
    """Death of a core; `in_work` are digests of the requests it was working on (`ProgressFile.digests`)."""

    message: str
    in_work: list[bytes]


FromReplica = CoreMessage | Alive | ReplicaCoreLost
Message = TypeVar("Message")


def facts_of(config: EngineConfig) -> dict[str, bytes]:
    """Return a digest of each property that a server and its remote replicas must share."""
    facts = options_of(config, PER_REPLICA_FIELDS) | model_of(config)
    return {name: sha256(fact).digest()[:8] for name, fact in facts.items()}


def arithmetic_of(config: EngineConfig) -> str:
    """Return the arithmetic of this host's replicas, as far as it depends on the host; empty: it does not."""
    return arithmetic() if config.device.device == "cpu" else ""


class ReplicaWire:
    """One end of a connection: any thread may send, one receives, and any may close.

    Every call raises OSError or EOFError if the other end is gone.
    """

    def __init__(self, way: socket.socket) -> None:
        self._way = way
        self._connection = Connection(os.dup(way.fileno()))
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()

    def send(self, message: CoreRequest | FromReplica) -> None:
        """Send a message; blocks until it is written."""
        frame = self._encoder.encode(message)
        with self._sending:
            self._connection.send_bytes(frame)

    def poll(self, seconds: float) -> bool:
        """Return whether there is something to receive within `seconds`."""
        return self._connection.poll(seconds)

    def receive(self) -> bytes:
        """Return the next frame."""
        return self._connection.recv_bytes()

    def close(self) -> None:
        """Shut the connection down for both ends; callable from any thread."""
        with suppress(OSError):
            self._way.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close and free the sockets; may be called twice, only by the receiving thread."""
        self.close()
        with self._sending:
            self._way.close()
            self._connection.close()


class BadFrameError(Exception):
    """Malformed frame."""


def decoded(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    """Decode a frame; raises BadFrameError if it is malformed."""
    try:
        return decoder.decode(frame)
    except NO_MESSAGE as error:
        raise BadFrameError(f"a frame of {len(frame)} bytes is not a message: {error}") from error


def sent_to(message: CoreRequest, ahead_s: float) -> CoreRequest:
    """Convert the times of a message for a core whose clock is `ahead_s` behind this one's."""
    if not isinstance(message, AddRequest):
        return message
    request = message.request
    moved = msgspec.structs.replace(request, arrival_time=request.arrival_time - ahead_s)
    return msgspec.structs.replace(message, request=moved)


def received_from(message: CoreMessage, ahead_s: float) -> CoreMessage:
    """Convert the times of such a core's message to this host's clock; 0.0 means not happened."""
    if not isinstance(message, EngineCoreOutputs):
        return message
    for update in message.updates:
        update.queued_ts += ahead_s if update.queued_ts else 0.0
        update.scheduled_ts += ahead_s if update.scheduled_ts else 0.0
    return msgspec.structs.replace(message, timestamp=message.timestamp + ahead_s)
