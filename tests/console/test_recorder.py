# SPDX-License-Identifier: Apache-2.0
"""Frames of a core, against the cache's own books, in any order of events, and their absence without a page."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.console import recorder
from quire.console.frames import CACHED, HELD, SHARED, BlockStates, Frame
from quire.console.recorder import LEASE_S, MIN_INTERVAL_S, ConsoleRecorder
from quire.engine.core_feature import CoreFeature
from quire.kv_cache.block_pool import BlockPool
from quire.kv_cache.rows import RowStoreInfo
from quire.kv_cache.spec import NULL_BLOCK_ID
from quire.scheduler.feature_stats import StoreStats
from quire.scheduler.output import SchedulerStats
from quire.scheduler.request import RequestStatus
from tests.scheduler.harness import VOCAB_SIZE, Engine, make_config

STEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


class Clock:
    """Time that passes when a test says so, and a little with each look."""

    def __init__(self, look_s: float = 0.0) -> None:
        self.now = 100.0
        self.look_s = look_s

    def __call__(self) -> float:
        self.now += self.look_s
        return self.now


def watched(engine: Engine, clock: Clock | None = None) -> ConsoleRecorder:
    return ConsoleRecorder(engine.config, engine.executor, engine.scheduler, clock or Clock())


def is_recorded(engine: Engine) -> bool:
    return engine.scheduler._observer is not None


def states_of(part: BlockStates) -> bytes:
    return base64.b64decode(part.states)


def ids_of(text: str | None) -> list[int]:
    assert text is not None
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def check_tier(part: BlockStates, pool: BlockPool, tables: Sequence[Sequence[int]]) -> None:
    """Assert that the states are those that the tables and the hashes say."""
    states = states_of(part)
    assert (part.num_blocks, part.first, len(states)) == (len(pool.blocks), 0, len(pool.blocks))
    held = {block for block, state in enumerate(states) if state & (HELD | SHARED)}
    assert (
        len(held) == pool.num_usable_blocks - pool.num_free_blocks == pool.num_usable_blocks - part.num_free
    )
    assert held == {block for table in tables for block in table}
    for block, state in enumerate(states):
        num_holders = sum(block in table for table in tables)
        assert bool(state & SHARED) == (num_holders > 1)
        assert not (state & HELD and state & SHARED)
    cached = {block.block_id for block in pool.cached_blocks.values()}
    assert {block for block, state in enumerate(states) if state & CACHED} == cached


def check_frame(frame: Frame, engine: Engine) -> None:
    """Assert that a frame shows what the scheduler's integrity check counts."""
    kv, stats = engine.scheduler.kv, engine.scheduler.stats()
    unfinished = [request for request in engine.requests.values() if not request.is_finished]
    assert frame.num_requests == len(frame.requests) == len(unfinished)
    assert frame.stats["kv_cache_usage"] == stats.kv_cache_usage
    running = [row.request_id for row in frame.requests if row.status == "running"]
    assert len(running) == stats.num_running == frame.stats["num_running"]
    check_tier(frame.device, kv.pool, [ids_of(row.device_blocks) for row in frame.requests])
    for row in frame.requests:
        tables = [manager.tables.get(row.request_id, ()) for manager in kv.managers]
        of_request = [
            block.block_id for table in tables for block in table if block.block_id != NULL_BLOCK_ID
        ]
        assert ids_of(row.device_blocks) == of_request
        waits = row.status != RequestStatus.RUNNING.name.lower()
        assert waits <= (row.cause is not None), "a request that waits has a cause"
    host = states_of(frame.host)
    swapped = {id_ for row in frame.requests for id_ in ids_of(row.host_blocks)}
    assert {block for block, state in enumerate(host) if state & (HELD | SHARED)} == swapped


@pytest.mark.parametrize("num_steps", [300, pytest.param(3400, marks=pytest.mark.more)])
@pytest.mark.parametrize(
    ("kinds", "num_host_blocks"), [(("full",), 0), (("full",), 40), (("full", "window 5"), 0)]
)
def test_frame_after_random_steps_equals_the_books(
    kinds: tuple[str, ...], num_host_blocks: int, num_steps: int
) -> None:
    num_frames = num_shared = num_preempted = 0
    rng, clock = random.Random(num_host_blocks), Clock()
    config = make_config(num_gpu_blocks_override=40, preemption_mode="swap", scheduling_policy="fair")
    engine = Engine(config, len(kinds), kinds, num_host_blocks)
    console = watched(engine, clock)
    for number in range(num_steps):
        if rng.random() < 0.3 and sum(not request.is_finished for request in engine.requests.values()) < 9:
            stem = STEM[: rng.choice([16, 12, 8, 0])]
            prompt = stem + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
            engine.add(f"r{number}", prompt, max_tokens=rng.randint(1, 30), tenant=rng.choice("ab"))
        if rng.random() < 0.02:
            engine.abort(*rng.sample([*engine.requests], 1)) if engine.requests else None
        engine.step()
        clock.now += MIN_INTERVAL_S
        if number % 3 == 0:
            frame = console.frame()
            check_frame(frame, engine)
            num_frames += 1
            num_shared += any(state & SHARED for state in states_of(frame.device))
            num_preempted += any(row.status == "preempted" for row in frame.requests)
    assert num_frames == num_steps // 3 + bool(num_steps % 3)
    assert num_shared > num_steps // 30
    assert num_preempted > 0


def test_recorder_without_a_page_installs_nothing() -> None:
    for name in (
        "has_work",
        "patience_s",
        "holds_for",
        "admitted",
        "advance",
        "stepped",
        "add_stats",
        "settle",
    ):
        assert vars(CoreFeature)[name] is getattr(ConsoleRecorder, name) or name not in vars(ConsoleRecorder)
        assert name not in vars(ConsoleRecorder), "called in every step"
    engine = Engine()
    console = watched(engine)
    engine.add("a", STEM)
    engine.drain()
    assert not is_recorded(engine)
    assert not console._steps
    assert console._frame is None


def test_recording_ends_when_pages_are_gone() -> None:
    engine, clock = Engine(), Clock()
    console = watched(engine, clock)
    console.frame()
    assert is_recorded(engine)
    engine.now = clock.now
    engine.add("a", STEM, max_tokens=30)
    engine.step()
    assert len(console._steps) == 1
    engine.now += LEASE_S
    engine.step()
    assert not is_recorded(engine)
    assert not console._steps
    assert console._frame is None
    clock.now = engine.now
    again = console.frame()
    assert (again.steps, again.number) == ([], 2)
    assert is_recorded(engine)
    console.close()
    assert not is_recorded(engine)


def test_pages_share_one_frame_until_it_is_old() -> None:
    clock = Clock()
    console = watched(Engine(), clock)
    first = console.frame()
    assert first.next_s == MIN_INTERVAL_S
    clock.now += MIN_INTERVAL_S / 2
    second = console.frame()
    assert (second.number, second.now, second.next_s) == (first.number, first.now, MIN_INTERVAL_S / 2)
    clock.now += MIN_INTERVAL_S / 2
    assert console.frame().number == first.number + 1


def test_costly_frames_are_made_rarely() -> None:
    clock = Clock(look_s=0.010)  # making one takes at least as long
    console = watched(Engine(), clock)
    frame = console.frame()
    assert frame.next_s >= 0.010 / recorder.MOST_OF_TIME * 0.99
    clock.now += 1.0
    assert console.frame().number == frame.number


def test_frame_lists_computed_tokens_of_steps() -> None:
    engine = Engine(make_config(max_num_batched_tokens=10), max_drafts=2)
    console = watched(engine)
    console.frame()
    engine.add("a", STEM[:12], max_tokens=6)
    plans, num_updates = [], 0
    while engine.scheduler.has_work():
        engine.now = 100.0
        plans.append(engine.step())
    steps = console.frame().steps
    plans = [plan for plan in plans if plan.scheduled]
    assert [step.step_id for step in steps] == [plan.step_id for plan in plans]
    assert [step.num_requests for step in steps] == [len(plan.scheduled) for plan in plans]
    assert steps[0].num_prefill_tokens == 10
    assert sum(step.num_prefill_tokens for step in steps) == 12
    num_updates = sum(len(update.new_token_ids) for update in engine.updates["a"])
    assert sum(step.num_sampled_tokens for step in steps) >= num_updates == 6
    assert sum(step.num_draft_tokens for step in steps) == sum(
        len(one.draft_token_ids) for plan in plans for one in plan.scheduled
    )
    assert sum(step.num_accepted_tokens for step in steps) <= sum(step.num_draft_tokens for step in steps)
    assert all(step.ended_s > step.planned_s for step in steps)
    assert [one.step_id for one in console.frame(steps[2].step_id).steps] == [
        one.step_id for one in steps[3:]
    ]


def test_frame_of_a_large_cache_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_BLOCKS", 50)
    clock = Clock()
    engine = Engine(make_config(num_gpu_blocks_override=120))
    console = watched(engine, clock)
    engine.add("a", STEM)
    engine.step()
    parts = []
    for _ in range(4):
        parts.append(console.frame().device)
        clock.now += MIN_INTERVAL_S
    assert [(part.first, len(states_of(part))) for part in parts] == [(0, 50), (50, 50), (100, 20), (0, 50)]
    whole = b"".join(states_of(part) for part in parts[:3])
    assert sum(bool(state & (HELD | SHARED)) for state in whole) == 4


def test_tables_that_do_not_fit_come_in_the_next_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_ENTRIES", 5)
    clock = Clock()
    engine = Engine(make_config(max_num_batched_tokens=64))
    console = watched(engine, clock)
    for name in "abcd":
        engine.add(name, [ord(name) % VOCAB_SIZE, *STEM[:11]], max_tokens=20)
    engine.step()
    seen: set[str] = set()
    for _ in range(4):
        new = {row.request_id for row in console.frame().requests if row.device_blocks is not None}
        assert 1 <= len(new) <= 2
        seen |= new
        clock.now += MIN_INTERVAL_S
    assert seen == set("abcd")


def test_frame_of_many_requests_is_bounded() -> None:
    engine = Engine(make_config(max_num_seqs=2))
    for number in range(3 * recorder.MAX_REQUESTS):
        engine.add(f"r{number}", STEM[:3])
    engine.step()
    frame = watched(engine).frame()
    assert (frame.num_requests, len(frame.requests)) == (3 * recorder.MAX_REQUESTS, recorder.MAX_REQUESTS)
    assert [row.status for row in frame.requests[:3]] == ["running", "running", "waiting"]
    assert {row.cause for row in frame.requests[2:]} == {"sequence_cap", "behind"}
    assert len(msgspec.json.encode(frame)) < 100_000


def test_block_names_its_holders_and_never_its_tokens() -> None:
    engine = Engine()
    console = watched(engine)
    engine.add("a", STEM, max_tokens=20)
    for _ in range(3):
        engine.step()
    engine.add("b", [*STEM, 7], max_tokens=20)
    engine.step()
    block = console.block("device", 1)
    assert block is not None
    assert [(one.request_id, one.group, one.position) for one in block.holders] == [("a", 0, 0), ("b", 0, 0)]
    assert (block.num_holders, block.is_full, len(block.content or "")) == (2, True, 16)
    assert console.block("device", 0) is console.block("device", 10_000) is console.block("host", 1) is None
    assert console.block("device", -1) is None


def test_frame_tells_how_full_the_store_is() -> None:
    engine = Engine(make_config())
    watching = watched(engine)
    assert watching.frame().store is None

    class Storing(CoreFeature):
        def add_stats(self, stats: SchedulerStats) -> None:
            stats.store = StoreStats("DISK", num_rows=7, num_bytes=7 << 20, num_loaded=2, num_saved=5)

    engine.executor.config = engine.config.evolve(kv_store="/tmp/unused", kv_store_gb=1.0)
    info = RowStoreInfo("DISK", 1 << 20, is_writable=True, num_rows=0)
    engine.executor.open_row_store = lambda: info  # type: ignore[method-assign]
    watching.others = (Storing(engine.config, engine.executor, engine.scheduler, Clock()),)
    watching._next_ts = 0.0
    store = watching.frame().store
    assert store is not None
    assert (store.medium, store.num_blocks, store.max_blocks) == ("DISK", 7, 1024)
    assert (store.num_bytes, store.num_loaded, store.num_saved) == (7 << 20, 2, 5)


def test_a_running_core_tells_a_page_how_full_the_store_is(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(recorder, "MOST_OF_TIME", 1e9)
    llm = LLM(str(tiny_model("llama")), cpu_threads=1, max_model_len=96, kv_store=str(tmp_path / "rows"))
    assert llm.llm_engine.call_core("console_frame")["store"]["num_saved"] == 0
    prompt = {"prompt_token_ids": [*STEM, *STEM]}
    llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert llm.llm_engine.call_core("reset_prefix_cache")  # it saves what is queued
    store = llm.llm_engine.call_core("console_frame")["store"]
    llm.shutdown()
    assert store["medium"] == "DISK"
    assert store["num_saved"] > 0
    assert store["max_blocks"] > 0


@pytest.mark.parametrize("num_pages", [1, 7])
def test_open_pages_cost_a_bounded_amount_of_work(num_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of a full batch on a large cache: the rows made and the bytes do not depend on the pages."""
    clock, made, looked = Clock(), list[int](), list[int]()
    engine = Engine(make_config(num_gpu_blocks_override=50_000, max_num_seqs=64))
    for number in range(64):
        engine.add(f"r{number}", [number % VOCAB_SIZE, *STEM], max_tokens=4)
    watching = watched(engine, clock)
    make, states = ConsoleRecorder._make_frame, recorder.block_states

    def counted(self: ConsoleRecorder, number: int, now: float) -> Frame:
        frame = make(self, number, now)
        made.append(len(msgspec.json.encode(frame)))
        return frame

    def counted_states(pool: BlockPool, first: int, limit: int) -> BlockStates:
        part = states(pool, first, limit)
        looked.append(len(states_of(part)))
        return part

    monkeypatch.setattr(ConsoleRecorder, "_make_frame", counted)
    monkeypatch.setattr(recorder, "block_states", counted_states)
    for _ in range(1000):
        clock.now += 0.01
        for _ in range(num_pages):
            watching.frame()
    seconds = 10.0
    assert len(made) <= seconds / MIN_INTERVAL_S + 1
    assert sum(looked) <= len(made) * 2 * recorder.MAX_BLOCKS
    assert sum(made) / seconds <= 4 * 100_000
