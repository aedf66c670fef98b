# SPDX-License-Identifier: Apache-2.0
"""Publisher of numbered KV event batches on a ZeroMQ socket, with replay on request.

Invariant: publishing never blocks. A slow or late subscriber misses batches, detects that by their numbers and
requests a replay. Messages are vLLM's: (topic, number as 8 bytes big-endian, msgpack of a `KVEventBatch`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from quire.config import EngineConfig
from quire.config.cache import KVEventsSettings
from quire.errors import ConfigError
from quire.kv_cache.events import AllBlocksCleared, BlockStored, KVCacheEvent, KVEventBatch
from quire.kv_cache.hashing import BlockHash

logger = logging.getLogger(__name__)

Batch = tuple[bytes, bytes]  # (number, payload) as sent

NUMBER_BYTES = 8
END_OF_REPLAY: Batch = (b"\xff" * NUMBER_BYTES, b"")
BOUND_ADDRESSES = (
    "ipc://",
    "inproc://",
    "tcp://*",
    "tcp://0.0.0.0",
    "tcp://127.",
    "tcp://localhost",
    "tcp://[::",
)
LINGER_MS = 500
REPLAY_SEND_TIMEOUT_MS = 1000  # Send timeout for a replay client that does not read.


class KVEventPublisher:
    """Owner of the PUB socket and the last batches; `publish` is called from one thread.

    The socket binds if its address is a wildcard, of this host's loopback or no network address at all; otherwise it
    connects to a subscriber's address.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, settings: KVEventsSettings, replica: int = 0) -> None:
        self._replica = replica
        self._topic = settings.topic.encode()
        self._uses_ints = settings.int_block_hashes
        self._encoder = msgspec.msgpack.Encoder()
        self._num_batches = 0
        self._recent: deque[Batch] = deque(maxlen=settings.buffer_steps)
        self._recent_lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(settings.hwm)
        self._socket.linger = LINGER_MS
        self._replay: threading.Thread | None = None
        try:
            self._open(settings)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            address = f"{settings.endpoint} or {settings.replay_endpoint}"
            raise ConfigError(f"--kv-events-config: cannot open {address}: {error}") from error

    def publish(self, events: list[KVCacheEvent], ts: float) -> None:
        """Send the events of one step and buffer them for replay; `ts` is in seconds since 1970."""
        if self._uses_ints:
            for event in events:
                _shorten(event)
        number = self._num_batches.to_bytes(NUMBER_BYTES, "big")
        batch = (number, self._encoder.encode(KVEventBatch(ts, events, self._replica)))
        self._num_batches += 1
        with self._recent_lock:
            self._recent.append(batch)
        self._socket.send_multipart((self._topic, *batch))  # a PUB socket drops what a subscriber cannot take

    def close(self) -> None:
        """Flush pending messages for LINGER_MS and close."""
        self._socket.close()
        self._context.term()
        if self._replay is not None:
            self._replay.join()

    def _open(self, settings: KVEventsSettings) -> None:
        if settings.endpoint.startswith(BOUND_ADDRESSES):
            self._socket.bind(settings.endpoint)
        else:
            self._socket.connect(settings.endpoint)
        if settings.replay_endpoint is not None:
            router = self._context.socket(zmq.ROUTER)
            router.bind(settings.replay_endpoint)
            self._replay = threading.Thread(
                target=serve_replays, args=(router, self._since), name="quire-kv-replay", daemon=True
            )
            self._replay.start()
        logger.info("KV events: published at %s, replay at %s", settings.endpoint, settings.replay_endpoint)

    def _since(self, first: int) -> list[Batch]:
        """Return the buffered batches from this number on."""
        with self._recent_lock:
            recent = list(self._recent)
        oldest = int.from_bytes(recent[0][0], "big") if recent else 0
        return recent[max(first - oldest, 0) :]


def create_publisher(config: EngineConfig) -> KVEventPublisher | None:
    """Return the publisher configured by `--kv-events-config`, if any."""
    if not config.kv_events.enabled:
        return None
    rank = config.parallel.first_replica
    return KVEventPublisher(config.kv_events.settings.of_replica(rank), rank)


def serve_replays(router: zmq.Socket[bytes], since: Callable[[int], list[Batch]]) -> None:
    """Serve replay requests until the socket's context ends.

    A request is the number of the first wanted batch, 8 bytes big-endian, after an empty part (as a REQ socket sends
    it). The answer is a message (empty, number, payload) for each batch, and at the end one with an empty payload.
    """
    router.router_mandatory = True  # wait for a slow client, up to a limit, in place of dropping
    router.sndtimeo = REPLAY_SEND_TIMEOUT_MS
    try:
        while True:
            client, *request = router.recv_multipart()
            if len(request) == 2 and len(request[1]) == NUMBER_BYTES:
                _answer(router, client, since(int.from_bytes(request[1], "big")))
            else:
                logger.warning(
                    "malformed replay request with parts of %s bytes", [len(part) for part in request]
                )
    except zmq.ContextTerminated:
        router.close(linger=0)


def _answer(router: zmq.Socket[bytes], client: bytes, batches: list[Batch]) -> None:
    try:
        for batch in (*batches, END_OF_REPLAY):
            router.send_multipart((client, b"", *batch))
    except zmq.ContextTerminated:
        raise
    except zmq.ZMQError as error:  # the client is gone, or does not read
        logger.warning("a replay was aborted: %s", error)


def _shorten(event: KVCacheEvent) -> None:
    if not isinstance(event, AllBlocksCleared):
        event.block_hashes = [low_64_bits(block_hash) for block_hash in event.block_hashes]
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        event.parent_block_hash = low_64_bits(event.parent_block_hash)


def low_64_bits(block_hash: BlockHash | int) -> int:
    """Return the low 64 bits of a block hash."""
    assert isinstance(block_hash, bytes), "a block's name was shortened twice"
    return int.from_bytes(block_hash[-8:], "big")
