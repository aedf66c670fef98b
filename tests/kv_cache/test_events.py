# SPDX-License-Identifier: Apache-2.0
"""A subscriber to KV events can reconstruct the prefix cache exactly."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.events import (
    DEVICE,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventLog,
)
from quire.kv_cache.hashing import ExtraKeys, MediaKey, extend_hashes
from tests.fixtures.cache_view import CacheView, check_hashes, content
from tests.fixtures.folded import folded
from tests.scheduler.harness import Engine, make_config
from tests.scheduler.test_state_machine import KINDS, prompts

EVENTS = {"enable_kv_cache_events": True}


class Sequence:
    """Tokens with the hashes of their full blocks."""

    def __init__(self, num_tokens: int, extra_keys: ExtraKeys, block_size: int = 4) -> None:
        self.token_ids = list(range(num_tokens))
        self.extra_keys = extra_keys
        self.block_hashes: list[bytes] = []
        extend_hashes(self.block_hashes, self.token_ids, block_size, extra_keys)


def key(block_hash: bytes, group_id: int = 0) -> bytes:
    return block_hash + group_id.to_bytes(4, "big")


def test_blocks_in_a_row_are_one_event_and_others_are_not() -> None:
    sequence, log = Sequence(20, ExtraKeys(None)), KVEventLog(4)
    hashes = sequence.block_hashes
    for place, group in ((1, 0), (2, 0), (4, 0), (1, 1)):
        log.stored(key(hashes[place], group))
    log.describe(sequence)
    assert log.take() == [
        BlockStored(hashes[1:3], hashes[0], list(range(4, 12)), 4, None, "GPU", None, None, 0),
        BlockStored(hashes[4:5], hashes[3], list(range(16, 20)), 4, None, "GPU", None, None, 0),
        BlockStored(hashes[1:2], hashes[0], list(range(4, 8)), 4, None, "GPU", None, None, 1),
    ]
    assert log.take() == []


def test_consecutive_removals_are_one_event_per_group_and_medium() -> None:
    log, (a, b, c, d) = KVEventLog(4), Sequence(16, ExtraKeys(None)).block_hashes
    log.removed(key(a))
    log.removed(key(b))
    log.removed(key(c), medium="CPU")
    log.removed(key(d, 1), medium="CPU")
    log.cleared()
    assert log.take() == [
        BlockRemoved([a, b], "GPU", 0),
        BlockRemoved([c], "CPU", 0),
        BlockRemoved([d], "CPU", 1),
        AllBlocksCleared(),
    ]


def test_content_on_its_way_to_the_host_and_back() -> None:
    """As a tier reports it: kept on the host and gone from the device; there again; evicted from the host."""
    sequence, log, view = Sequence(4, ExtraKeys(None)), KVEventLog(4), CacheView()
    (block_hash,) = sequence.block_hashes
    device, host = BlockPool(2, events=log), BlockPool(2, on_host=True, events=log)
    known: list[set[str]] = []

    def store(pool: BlockPool) -> None:
        blocks = pool.get_new_blocks(1)
        pool.cache_full_blocks(blocks, [key(block_hash)])
        pool.free(blocks)
        if pool is device:
            log.describe(sequence)

    def look() -> None:
        view.apply(log.take())
        assert all((group, name) == (0, block_hash) for _, group, name in view.blocks)
        known.append({medium for medium, _, _ in view.blocks})

    store(device)
    look()
    store(host)
    device.free(device.get_new_blocks(1))
    look()
    store(device)
    look()
    host.get_new_blocks(1)
    look()
    assert known == [{DEVICE}, {HOST}, {DEVICE, HOST}, {DEVICE}]


def test_extra_keys_are_reported_for_each_block() -> None:
    media = MediaKey(b"image", 6, 9)
    sequence, log = Sequence(12, ExtraKeys("salt", "3:lora", (media,))), KVEventLog(4)
    for block_hash in sequence.block_hashes:
        log.stored(key(block_hash))
    log.describe(sequence)
    (event,) = log.take()
    assert event.lora_name == "lora"
    assert event.extra_keys == [
        ExtraKeys("salt", "3:lora"),
        ExtraKeys("salt", "3:lora", (media,)),
        ExtraKeys("salt", "3:lora", (media,)),
    ]
    check_hashes(event)


def test_the_form_on_the_wire_is_that_of_vllm() -> None:
    """Arrays, tagged with the class's name; a decoder that knows fewer fields reads the first ones."""
    sequence, log = Sequence(4, ExtraKeys(None)), KVEventLog(4)
    (block_hash,) = sequence.block_hashes
    log.stored(key(block_hash))
    log.describe(sequence)
    log.removed(key(block_hash))
    log.cleared()
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(1.5, log.take())))
    assert batch == [
        1.5,
        [
            ["BlockStored", [block_hash], None, [0, 1, 2, 3], 4, None, "GPU", None, None, 0],
            ["BlockRemoved", [block_hash], "GPU", 0],
            ["AllBlocksCleared"],
        ],
        0,
    ]


def test_events_are_not_collected_by_default() -> None:
    engine = Engine()
    engine.add("a", range(12))
    engine.drain()
    assert engine.scheduler._kv.events is None
    assert engine.scheduler.pop_kv_events() == []


requests = st.tuples(prompts(), st.integers(1, 12), st.sampled_from([None, None, "tenant"]))
adding = st.tuples(st.just("add"), requests)
stepping = st.tuples(st.just("step"), st.integers(1, 20))
operations = st.lists(
    adding
    | adding
    | stepping
    | stepping
    | st.tuples(st.sampled_from(["abort", "fail"]), st.integers(0, 20))
    | st.tuples(st.just("reset"), st.none()),
    min_size=30,
    max_size=60,
)


class Watched:
    """A scheduler and a subscriber that looks at it after every operation."""

    def __init__(self, kinds: tuple[str, ...], num_blocks: int, num_host_blocks: int = 0) -> None:
        config = make_config(
            num_gpu_blocks_override=num_blocks,
            kv_events_config=EVENTS,
            max_model_len=40,
            preemption_mode="swap",
        )
        self.engine = Engine(config, len(kinds), kinds, num_host_blocks)
        self.view = CacheView()

    def run(self, operation: str, argument: Any) -> None:
        engine = self.engine
        if operation == "add":
            prompt, max_tokens, salt = argument
            engine.add(f"r{len(engine.requests)}", prompt, max_tokens=max_tokens, cache_salt=salt)
        elif operation == "abort":
            engine.abort(f"r{argument}")
        elif operation == "fail" and engine.has_ready():
            engine.fail(f"r{argument}")
        elif operation == "reset":
            engine.scheduler.reset_prefix_cache()
        for _ in range(argument if operation == "step" else 0):
            if engine.scheduler.has_work():
                engine.step()
        self.look()

    def look(self) -> None:
        self.view.apply(self.engine.scheduler.pop_kv_events())
        pool = self.engine.scheduler._kv._pool
        assert self.view.blocks == content(pool.cached_blocks) | content(pool.host.pool.cached_blocks, HOST)


@settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(KINDS), st.integers(0, 12), st.sampled_from([0, 0, 3, 12, 40]), operations)
def test_subscriber_has_the_exact_cache(
    kinds: tuple[str, ...], slack: int, num_host_blocks: int, todo: list[tuple[str, Any]]
) -> None:
    """Traffic with evictions (the pool holds little more than one request), swaps, preemptions, aborts and resets."""
    watched = Watched(kinds, 1 + 10 * len(kinds) + slack, num_host_blocks)
    for operation, argument in todo:
        watched.run(operation, argument)
    watched.engine.drain()
    watched.look()


@folded("kinds", KINDS)
def test_eviction_is_an_event(kinds: tuple[str, ...]) -> None:
    watched = Watched(kinds, num_blocks=1 + 10 * len(kinds))
    for number in range(8):
        watched.engine.add(f"r{number}", [number] * 17)
    watched.engine.drain()
    told = watched.engine.scheduler.pop_kv_events()
    watched.view.apply(told)
    assert any(isinstance(event, BlockRemoved) for event in told)
    assert watched.view.blocks
