# SPDX-License-Identifier: Apache-2.0
"""A core with a store that is slow, short, broken or read-only gives the tokens of a core without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests, AddRequest, EngineCoreRequest, UtilityCall, UtilityResult
from quire.engine.startup import prepare
from quire.engine.trace import TransfersEnded, read_trace, replay
from quire.kv_cache.spec import KVCacheSpec
from quire.kv_store import tier
from quire.sampling_params import SamplingParams
from quire.scheduler.output import RequestUpdate
from tests.kv_store.storing_executor import Disk, StoringExecutor
from tests.scheduler.harness import make_spec

KINDS = [("full",), ("full", "window 5"), ("full", "state 2"), ("window 9",), ("chunk 6", "full")]
PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 20, 21],
    [1, 2, 3, 4, 5, 6, 7, 8, 30, 31, 32, 33, 34, 35, 36, 37, 38],
    [9, 8, 7, 6, 5, 4, 3, 2, 1],
]


def specs_of(kinds: tuple[str, ...]) -> dict[str, KVCacheSpec]:
    return {f"layers.{place}": make_spec(kind, 4) for place, kind in enumerate(kinds)}


def config_for(model: Path, **changes: Any) -> EngineConfig:
    args: dict[str, Any] = {
        "model": str(model), "distributed_executor_backend": "tests.kv_store.storing_executor:StoringExecutor",
        "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4, "max_model_len": 64,
        "num_gpu_blocks_override": 40, "kv_store": "/nowhere",
    }  # fmt: skip
    return prepare(EngineConfig.from_args(**(args | changes)), "offline")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A core, its clock, and the tokens of its requests so far."""

    def __init__(self, config: EngineConfig, disk: Disk, specs: Mapping[str, KVCacheSpec]) -> None:
        StoringExecutor.disk, StoringExecutor.specs = disk, specs
        self.clock = Clock()
        self.core = EngineCore(config, self.clock)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, RequestUpdate] = {}

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        wanted = SamplingParams(**({"temperature": 0.0, "max_tokens": 7, "ignore_eos": True} | params))
        self.tokens[name] = []
        self.core.handle(AddRequest(EngineCoreRequest(name, list(prompt), wanted, self.clock.now)))

    def step(self) -> None:
        self.clock.now += 0.01
        for update in self.core.step().updates:
            self.tokens[update.request_id] += update.new_token_ids
            if update.finish_reason is not None:
                self.ended[update.request_id] = update
        self.core.scheduler.check_integrity()

    def finish(self) -> None:
        """Step as clients do, with work only; time passes in steps alone, so that no limit ends a wait."""
        for _ in range(3000):
            if not self.core.scheduler.has_unfinished_requests():
                return
            if self.core.has_work():
                self.step()
        raise AssertionError(f"{self.core.scheduler.request_ids()} never end")


@pytest.fixture
def model(null_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tier, "POLL_S", 0.0)  # rows come after a number of polls here
    return null_model_dir


def tokens_alone(
    config: EngineConfig, specs: Mapping[str, KVCacheSpec], prompt: list[int], **params: Any
) -> list[int]:
    engine = Engine(config.evolve(kv_store=None), Disk(), specs)
    engine.add("alone", prompt, **params)
    engine.finish()
    return engine.tokens["alone"]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prefix_is_computed_once_also_after_a_restart(
    model: Path, kinds: tuple[str, ...], async_scheduling: bool
) -> None:
    config, disk, specs = config_for(model, async_scheduling=async_scheduling), Disk(), specs_of(kinds)
    expected = tokens_alone(config, specs, PROMPTS[0])
    first = Engine(config, disk, specs)
    first.add("a", PROMPTS[0])
    first.finish()
    first.core.shutdown()
    assert first.ended["a"].num_cached_tokens == 0
    disk.delay = 3
    second = Engine(config, disk, specs)
    second.add("a", PROMPTS[0])
    second.finish()
    assert first.tokens["a"] == second.tokens["a"] == expected
    update = second.ended["a"]
    assert (update.num_cached_tokens, update.num_stored_tokens) == (16, 16)
    second.add("b", PROMPTS[0])
    second.finish()
    assert (second.ended["b"].num_cached_tokens, second.ended["b"].num_stored_tokens) == (16, 0)
    second.core.shutdown()


def test_held_request_is_explained_and_times_out(model: Path) -> None:
    config, disk, specs = config_for(model), Disk(), specs_of(("full",))
    first = Engine(config, disk, specs)
    first.add("a", PROMPTS[0])
    first.finish()
    first.core.shutdown()
    disk.delay = 300
    second = Engine(config, disk, specs)
    second.add("a", PROMPTS[0])
    explained = second.core.explain("a")
    assert explained is not None
    assert explained.cause == "not_ready"
    second.clock.now += 20.0
    second.finish()
    assert second.tokens["a"] == first.tokens["a"]
    assert second.ended["a"].num_cached_tokens == 0
    stats = second.core.step().stats
    assert stats is not None
    assert stats.store is not None
    assert (stats.store.num_timeouts, stats.store.is_resting) == (1, True)
    second.add("b", PROMPTS[0])
    assert second.core.explain("b") is not None
    second.finish()
    assert second.ended["b"].num_cached_tokens == 16, "from the device: the store is left alone"
    second.core.shutdown()


def test_request_is_released_at_any_poll_that_ends_its_load(model: Path) -> None:
    """Also at the one behind the last step of another request, after which nothing else is due."""
    config, disk, specs = config_for(model), Disk(), specs_of(("full",))
    first = Engine(config, disk, specs)
    first.add("a", PROMPTS[0])
    first.finish()
    first.core.shutdown()
    disk.is_writable = False
    for delay in range(30):
        disk.delay = 0
        second = Engine(config, disk, specs)
        second.add("other", PROMPTS[3])
        disk.delay = delay
        second.add("a", PROMPTS[0])
        second.finish()
        assert second.tokens["a"] == first.tokens["a"]
        assert second.ended["a"].num_stored_tokens == 16
        second.core.shutdown()


def test_rate_of_a_slow_minute_does_not_end_loads_for_good(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, disk, specs = config_for(model), Disk(), specs_of(("full",))
    first = Engine(config, disk, specs)
    first.add("a", PROMPTS[0])
    first.finish()
    first.core.shutdown()
    monkeypatch.setattr(tier, "EXPECTED_BYTES_PER_S", 1e-3)
    monkeypatch.setattr(tier, "REGAINED", 1e12)
    second = Engine(config, disk, specs)
    stored = []
    for number in range(2):
        second.add(str(number), PROMPTS[0])
        second.finish()
        stored.append(second.ended[str(number)].num_stored_tokens)
        second.core.handle(UtilityCall(1, "reset_prefix_cache", []))
    assert stored == [0, 16]
    second.core.shutdown()


@pytest.mark.parametrize(("lost", "num_cached"), [(0, 0), (2, 8), (3, 12)])
def test_rows_that_are_not_loaded_are_computed(model: Path, lost: int, num_cached: int) -> None:
    config, disk, specs = config_for(model), Disk(), specs_of(("full",))
    first = Engine(config, disk, specs)
    first.add("a", PROMPTS[0])
    first.finish()
    first.core.shutdown()
    disk.loses = frozenset({lost})
    second = Engine(config, disk, specs)
    second.add("a", PROMPTS[0])
    second.finish()
    second.core.shutdown()
    assert second.tokens["a"] == first.tokens["a"]
    update = second.ended["a"]
    assert (update.num_cached_tokens, update.num_stored_tokens) == (num_cached, num_cached)


def test_a_recorded_run_can_be_replayed(model: Path, tmp_path: Path) -> None:
    config, disk, specs = config_for(model), Disk(), specs_of(("full", "window 5"))
    first = Engine(config, disk, specs)
    first.add("a", PROMPTS[0])
    first.finish()
    first.core.shutdown()
    second = Engine(config.evolve(record_trace=str(tmp_path / "run")), disk, specs)
    for number, prompt in enumerate(PROMPTS):
        second.add(str(number), prompt)
    second.finish()
    second.core.shutdown()
    assert second.ended["0"].num_stored_tokens == 16
    trace = read_trace(tmp_path / "run")
    assert any(isinstance(frame, TransfersEnded) for frame in trace.frames)
    assert len(list(replay(trace))) > 3


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_request_loads_evicted_blocks(model: Path, async_scheduling: bool) -> None:
    """Asleep, an engine loses its cache on both tiers; woken, it computes little again."""
    config, disk, specs = config_for(model, async_scheduling=async_scheduling), Disk(), specs_of(("full",))
    expected = tokens_alone(config, specs, PROMPTS[0])
    engine = Engine(config, disk, specs)
    engine.add("a", PROMPTS[0])
    while len(engine.tokens["a"]) < 5:
        engine.step()
    for method, argument in (("sleep", 1), ("wake_up", ["weights", "kv_cache", "scheduling"])):
        answer = engine.core.handle(UtilityCall(1, method, [argument]))
        assert isinstance(answer, UtilityResult)
        assert answer.error is None
    engine.finish()
    assert engine.tokens["a"] == expected
    update, stats = engine.ended["a"], engine.core.step().stats
    assert (update.num_preemptions, update.num_cached_tokens, update.num_stored_tokens) == (1, 0, 0)
    assert stats is not None
    assert stats.store is not None
    assert (stats.store.num_reloads, stats.store.num_loaded) == (1, 5)
    engine.core.shutdown()


def test_requests_short_of_blocks_reload_from_the_store(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is room to resume them; the host tier is too small for what they lose."""
    config = config_for(model, num_gpu_blocks_override=16, max_model_len=40, max_num_seqs=4)
    monkeypatch.setattr("quire.kv_cache.sizing.BUFFER_BYTES", 0)
    monkeypatch.setattr("quire.kv_cache.sizing.MIN_BUFFER_BLOCKS", 4)
    disk, specs = Disk(), specs_of(("full",))
    prompts = [[start] * 12 for start in range(1, 5)]
    expected = [tokens_alone(config, specs, prompt, max_tokens=24) for prompt in prompts]
    engine = Engine(config, disk, specs)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, max_tokens=24)
    engine.finish()
    assert [engine.tokens[str(number)] for number in range(len(prompts))] == expected
    assert sum(update.num_preemptions for update in engine.ended.values()) > 0
    stats = engine.core.step().stats
    assert stats is not None
    assert stats.store is not None
    assert stats.store.num_reloads > 0
    assert sum(update.num_stored_tokens for update in engine.ended.values()) == 0
    engine.core.shutdown()


def test_prompt_logprobs_and_salts_keep_their_own(model: Path) -> None:
    config, disk, specs = config_for(model), Disk(), specs_of(("full",))
    first = Engine(config, disk, specs)
    first.add("a", PROMPTS[0])
    first.finish()
    first.core.shutdown()
    second = Engine(config, disk, specs)
    second.add("a", PROMPTS[0], prompt_logprobs=1)
    second.finish()
    assert second.ended["a"].num_cached_tokens == 0
    second.core.shutdown()
    third = Engine(config, disk, specs)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    third.tokens["b"] = []
    third.core.handle(AddRequest(EngineCoreRequest("b", PROMPTS[0], params, 0.0, cache_salt="mine")))
    third.finish()
    assert third.ended["b"].num_cached_tokens == 0
    third.core.shutdown()


class StoreMachine(RuleBasedStateMachine):
    """Random requests, aborts, resets, restarts and faults of a store."""

    model: Path

    @initialize(kinds=st.sampled_from(KINDS), ahead=st.booleans(), blocks=st.sampled_from([14, 18, 40]))
    def begin(self, kinds: tuple[str, ...], ahead: bool, blocks: int) -> None:
        self.specs, self.disk = specs_of(kinds), Disk()
        self.config = config_for(
            self.model, async_scheduling=ahead, num_gpu_blocks_override=len(kinds) * blocks, max_model_len=28
        )
        self.expected = [tokens_alone(self.config, self.specs, prompt) for prompt in PROMPTS]
        self.engine = Engine(self.config, self.disk, self.specs)
        self.prompts: dict[str, int] = {}
        self.count = 0

    @rule(number=st.integers(0, len(PROMPTS) - 1))
    def add(self, number: int) -> None:
        self.count += 1
        self.prompts[str(self.count)] = number
        self.engine.add(str(self.count), PROMPTS[number])

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.engine.core.handle(AbortRequests([name]))
        del self.prompts[name]

    @rule(delay=st.integers(0, 40), loses=st.frozensets(st.integers(0, 5)), fails=st.booleans())
    def change_disk(self, delay: int, loses: frozenset[int], fails: bool) -> None:
        self.disk.delay, self.disk.loses, self.disk.fails = delay, loses, fails

    @rule(share=st.integers(2, 3))
    def lose_rows(self, share: int) -> None:
        for place, name in enumerate(list(self.disk.rows)):
            if place % share == 0:
                del self.disk.rows[name]

    @rule()
    def wait(self) -> None:
        self.engine.clock.now += 61.0

    @rule(level=st.integers(0, 1), number=st.integers(0, len(PROMPTS) - 1))
    def sleep(self, level: int, number: int) -> None:
        for method, argument in (("sleep", level), ("wake_up", ["weights", "kv_cache", "scheduling"])):
            if method == "wake_up":
                self.add(number)
            answer = self.engine.core.handle(UtilityCall(1, method, [argument]))
            assert isinstance(answer, UtilityResult)
            assert answer.error is None

    @rule(is_writable=st.booleans())
    def restart(self, is_writable: bool) -> None:
        self.settle()
        self.disk.is_writable = is_writable
        self.engine = Engine(self.config, self.disk, self.specs)

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "engine"):
            self.engine.core.scheduler.check_integrity()

    def settle(self) -> None:
        """Let all requests end, and compare their tokens."""
        self.engine.finish()
        for name, number in self.prompts.items():
            assert self.engine.tokens[name] == self.expected[number]
        self.prompts = {}
        self.engine.core.shutdown()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.settle()


def test_tokens_are_equal_without_the_store_for_any_store_events(model: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("Machine", (StoreMachine,), {"model": model})
    run_state_machine_as_test(machine, settings=settings(max_examples=80, stateful_step_count=30))
