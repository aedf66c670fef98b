# SPDX-License-Identifier: Apache-2.0
"""KV events over real sockets: a subscriber rebuilds the cache, and replay mends what it missed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.config.cache import KVEventsSettings
from quire.engine.kv_events import KVEventPublisher, low_64_bits
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.kv_cache.events import AllBlocksCleared, BlockStored, KVCacheEvent, KVEventBatch
from quire.sampling_params import SamplingParams
from tests.fixtures.cache_view import CacheView, content

PATIENCE_MS = 10_000
"""For what must come; nothing is waited for that long unless it is lost."""

Message = tuple[int, KVEventBatch]


class Subscriber:
    """As a router would be: one socket for what happens, one to ask for what was missed."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "", hwm: int = 1000) -> None:
        self._context = zmq.Context()
        self._feed = self._context.socket(zmq.SUB)
        self._feed.set_hwm(hwm)
        self._feed.subscribe(topic)
        self._feed.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def hears(self, timeout_ms: int = PATIENCE_MS) -> bool:
        return bool(self._feed.poll(timeout_ms))

    def next(self) -> Message:
        assert self.hears(), "a message is missing"
        _, number, payload = self._feed.recv_multipart()
        return self._message(number, payload)

    def topic(self) -> bytes:
        assert self.hears()
        return self._feed.recv_multipart()[0]

    def replay(self, first: int) -> Iterator[Message]:
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(PATIENCE_MS), "an answer has no end"
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert number == b"\xff" * 8
                return
            yield self._message(number, payload)

    def _message(self, number: bytes, payload: bytes) -> Message:
        assert len(number) == 8
        return int.from_bytes(number, "big"), self._decoder.decode(payload)


def mended(heard: Iterable[Message], subscriber: Subscriber, first: int) -> Iterator[Message]:
    """Yield the received messages, with the gaps before each filled by replay."""
    for number, batch in heard:
        if number > first:
            missed = subscriber.replay(first)
            yield from (message for message in missed if message[0] < number)
        yield number, batch
        first = number + 1
    yield from subscriber.replay(first)


@pytest.fixture
def addresses(tmp_path: Path) -> dict[str, str]:
    return {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}


@contextlib.contextmanager
def engine_and_subscriber(
    model_dir: Path, addresses: dict[str, str], *, in_process: bool = True, **more: Any
) -> Iterator[tuple[LLMEngine, Subscriber, int]]:
    """An engine, a subscriber who hears it, and the number of the next batch."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "int_block_hashes": False,
        **addresses,
        **more,
    }
    args: dict[str, Any] = {
        "model": str(model_dir),
        "distributed_executor_backend": "null",
        "num_gpu_blocks_override": 18,
        "block_size": 8,
        "kv_events_config": config,
    }
    engine = LLMEngine(EngineConfig.from_args(**args), in_process=in_process)
    subscriber = Subscriber(**addresses)
    try:
        yield engine, subscriber, greet(engine, subscriber)
    finally:
        subscriber.close()
        engine.shutdown()


def greet(engine: LLMEngine, subscriber: Subscriber) -> int:
    """Publish until the subscription has arrived; returns the number of the next batch."""
    num_batches = 0
    while not subscriber.hears(timeout_ms=10):
        assert num_batches < 1000, "the subscriber hears nothing"
        assert engine.reset_prefix_cache()
        num_batches += 1
    while subscriber.next()[0] < num_batches - 1:
        pass
    return num_batches


def cached_blocks(engine: LLMEngine) -> Any:
    return engine._clients[0]._core.scheduler._kv._pool.cached_blocks  # type: ignore[attr-defined]


def run(engine: LLMEngine, prompts: list[list[int]], number: int = 0) -> None:
    for place, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
        engine.add_request(f"{number}-{place}", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()


token = st.integers(0, 20)
batches_of_prompts = st.lists(
    st.lists(st.integers(1, 50).flatmap(lambda n: token.map(lambda t: [t] * n)), min_size=1, max_size=4),
    min_size=4,
    max_size=8,
)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    work=batches_of_prompts, resets=st.sets(st.integers(0, 7)), lost=st.sets(st.integers(0, 60), max_size=40)
)
def test_subscriber_with_lost_messages_rebuilds_the_exact_cache(
    null_model_dir: Path, addresses: dict[str, str], work: list[Any], resets: set[int], lost: set[int]
) -> None:
    """Traffic with evictions and resets; `lost` are the messages that do not arrive."""
    with engine_and_subscriber(null_model_dir, addresses) as (engine, subscriber, first):
        for place, prompts in enumerate(work):
            run(engine, prompts, place)
            if place in resets:
                assert engine.reset_prefix_cache()
        total = engine._clients[0]._core._publisher._num_batches  # type: ignore[attr-defined]
        heard = [subscriber.next() for _ in range(first, total)]
        assert [number for number, _ in heard] == list(range(first, total))
        view = CacheView()
        arrived = [message for place, message in enumerate(heard) if place not in lost]
        numbers = []
        for number, batch in mended(arrived, subscriber, first):
            numbers.append(number)
            view.apply(batch.events)
        assert numbers == list(range(first, total))
        assert view.blocks == content(cached_blocks(engine))


@pytest.mark.more
def test_a_core_in_another_process_publishes_too(null_model_dir: Path, addresses: dict[str, str]) -> None:
    with engine_and_subscriber(null_model_dir, addresses, in_process=False) as (engine, subscriber, first):
        run(engine, [[1] * 40])
        view = CacheView()
        for _, batch in mended([], subscriber, first):
            view.apply(batch.events)
        assert len(view.blocks) == 6
        assert engine.reset_prefix_cache()
        view.apply(list(mended([], subscriber, first))[-1][1].events)
        assert view.blocks == set()


def test_short_names_are_the_low_64_bits(null_model_dir: Path, addresses: dict[str, str]) -> None:
    with engine_and_subscriber(null_model_dir, addresses, int_block_hashes=True) as (
        engine,
        subscriber,
        first,
    ):
        run(engine, [[1] * 20])
        stored = [event for _, batch in subscriber.replay(first) for event in batch.events]
        names = [name for event in stored if isinstance(event, BlockStored) for name in event.block_hashes]
        assert names == [low_64_bits(key[:32]) for key in cached_blocks(engine)]
        assert stored[-1].parent_block_hash == names[-2]


def test_the_topic_is_the_first_part(null_model_dir: Path, addresses: dict[str, str]) -> None:
    with engine_and_subscriber(null_model_dir, addresses, topic="kv@1") as (engine, subscriber, _):
        run(engine, [[1] * 20])
        assert subscriber.topic() == b"kv@1"


# The publisher alone


@contextlib.contextmanager
def publisher(**fields: Any) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(KVEventsSettings(int_block_hashes=False, **fields))
    try:
        yield publisher
    finally:
        publisher.close()


def big_event() -> list[KVCacheEvent]:
    return [BlockStored([b"h" * 32], None, [10**6] * 5000, 5000, None, "GPU", None, None, 0)]


def test_slow_subscriber_blocks_nothing_and_detects_its_loss(
    addresses: dict[str, str],
) -> None:
    with publisher(hwm=2, **addresses) as sender, contextlib.closing(Subscriber(**addresses, hwm=2)) as slow:
        while not slow.hears(timeout_ms=10):
            sender.publish([AllBlocksCleared()], 0.0)
        for _ in range(1000):
            sender.publish(big_event(), 1.0)
        total = sender._num_batches
        heard = [slow.next()]
        while slow.hears(timeout_ms=100):
            heard.append(slow.next())
        numbers = [number for number, _ in heard]
        assert numbers == sorted(numbers)
        assert len(numbers) < total
        assert [number for number, _ in mended(heard, slow, 0)] == list(range(total))


def test_messages_older_than_the_buffer_are_lost_detectably(addresses: dict[str, str]) -> None:
    with (
        publisher(buffer_steps=3, **addresses) as sender,
        contextlib.closing(Subscriber(**addresses)) as late,
    ):
        for number in range(10):
            sender.publish([AllBlocksCleared()], float(number))
        assert [(number, batch.ts) for number, batch in late.replay(0)] == [(7, 7.0), (8, 8.0), (9, 9.0)]
        assert [number for number, _ in late.replay(9)] == [9]
        assert list(late.replay(10)) == []
        assert list(late.replay(2**64 - 1)) == []


def test_a_request_of_another_form_is_passed_over(addresses: dict[str, str]) -> None:
    with publisher(**addresses) as sender, contextlib.closing(Subscriber(**addresses)) as client:
        sender.publish([AllBlocksCleared()], 0.0)
        for parts in ([b"x"], [b"", b"too short"], [b"", b"12345678", b"more"]):
            client._replay.send_multipart(parts)
        assert [number for number, _ in client.replay(0)] == [0]


def test_a_req_socket_gets_the_first_batch_that_is_left(addresses: dict[str, str]) -> None:
    with publisher(**addresses) as sender, zmq.Context() as context, context.socket(zmq.REQ) as client:
        sender.publish([AllBlocksCleared()], 0.0)
        client.linger = 0
        client.connect(addresses["replay_endpoint"])
        client.send((0).to_bytes(8, "big"))
        assert client.poll(PATIENCE_MS)
        number, payload = client.recv_multipart()
        assert (number, bool(payload)) == (bytes(8), True)


def test_publisher_connects_to_a_foreign_address() -> None:
    """Many engines may feed one router, which has bound its socket."""
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe("")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        # 127.0.0.1 would be ours to bind; to connect to 0 is to connect to this host.
        with publisher(endpoint=f"tcp://0:{port}") as sender:
            for _ in range(1000):
                sender.publish([AllBlocksCleared()], 0.0)
                if router.poll(10):
                    break
            assert len(router.recv_multipart()) == 3


def test_an_address_in_use_is_a_start_up_error(addresses: dict[str, str]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigError, match=f"cannot open tcp://127.0.0.1:{port}"):
            KVEventPublisher(KVEventsSettings(endpoint=f"tcp://127.0.0.1:{port}"))
        with pytest.raises(ConfigError, match="cannot open"):
            KVEventPublisher(
                KVEventsSettings(endpoint=addresses["endpoint"], replay_endpoint=f"tcp://127.0.0.1:{port}")
            )


# The flag


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"enable": True}, "unknown field `enable`"),
        ({"buffer_steps": 0}, "`int` >= 1 - at `\\$.buffer_steps`"),
        ({"publisher": "nats"}, "Invalid enum value 'nats'"),
        ({"topic": 5}, "Expected `str`, got `int`"),
    ],
)
def test_bad_settings_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-events-config: .*{message}"):
        EngineConfig.from_args(kv_events_config=config)


@pytest.mark.parametrize(
    "config", [{}, {"publisher": "zmq"}, {"enable_kv_cache_events": True, "publisher": "null"}]
)
def test_events_are_off_by_default(config: dict[str, Any]) -> None:
    assert not EngineConfig.from_args(kv_events_config=config).kv_events.enabled


def test_events_need_a_prefix_cache(null_model_dir: Path) -> None:
    config = EngineConfig.from_args(
        model=str(null_model_dir),
        distributed_executor_backend="null",
        enable_prefix_caching=False,
        kv_events_config={"enable_kv_cache_events": True},
    )
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching"):
        LLMEngine(config)
