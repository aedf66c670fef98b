# SPDX-License-Identifier: Apache-2.0
"""The worker and its executor with a real, tiny Llama."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, StartupError
from quire.executor import uniproc
from quire.executor.base import resolve_executor
from quire.executor.uniproc import UniprocExecutor
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.sizing import size_kv_cache
from quire.kv_cache.spec import KVCacheConfig
from quire.platforms import Host
from quire.sampling_params import SamplingParams
from quire.scheduler.output import SchedulerOutput
from quire.worker.cpu import CpuDevice, recorded_tokens
from quire.worker.stage_sizes import GAPS
from quire.worker.worker import Worker
from tests.models.harness import prepared_config
from tests.worker.harness import Driver, Sequence

GIB = 2**30
NUM_BLOCKS = 40


class RoomyHost(Host):
    """A machine with so much free memory."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self._free = free

    def available_bytes(self) -> int:
        return self._free


class FakeDevice(CpuDevice):
    """A CPU whose threads are left alone."""

    def start(self, config: EngineConfig) -> None:
        return None


@pytest.fixture
def config(tiny_model: Callable[[str], Path]) -> EngineConfig:
    return prepared_config(tiny_model("llama"), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)


def loaded(config: EngineConfig, free: int = GIB) -> Worker:
    worker = Worker(config, FakeDevice(RoomyHost(free)))
    worker.load()
    return worker


def reserved_bytes(worker: Worker) -> int:
    """Return the bytes that the worker leaves free for a step."""
    device, limits, vocab_size = worker._device, worker._config.scheduler, worker._config.arch.vocab_size
    assert isinstance(device, CpuDevice)
    peak, num_seqs = device.memory.forward_peak, limits.max_num_seqs
    step = peak.bytes_of_step(limits.max_num_batched_tokens, num_seqs * vocab_size)
    _, rounds = device.memory.size_of_rounds(worker._config)
    return int(GAPS * step) + peak.graph_bytes(recorded_tokens(worker._config)) + rounds


def ready(config: EngineConfig) -> Worker:
    worker = loaded(config)
    specs = worker.kv_cache_specs()
    worker.initialize_kv_cache(KVCacheConfig(NUM_BLOCKS, group_layers(specs, 64), dict(specs)))
    return worker


def driver_of(config: EngineConfig) -> Driver:
    worker = ready(config)
    assert worker._runner is not None
    return Driver(worker._runner, num_blocks=NUM_BLOCKS)


def test_step_runs_within_its_devices_step(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's step ends also if the launch fails."""
    worker, happened = ready(config), list[str]()

    @contextmanager
    def step(_device: FakeDevice) -> Iterator[None]:
        happened.append("begun")
        try:
            yield
        finally:
            happened.append("ended")

    def launch(_plan: SchedulerOutput) -> None:
        happened.append("launched")
        raise ZeroDivisionError

    monkeypatch.setattr(FakeDevice, "step", step)
    monkeypatch.setattr(worker._runner, "launch", launch)
    with pytest.raises(ZeroDivisionError):
        worker.submit(SchedulerOutput(0, [], [], []))
    assert happened == ["begun", "launched", "ended"]


def test_cache_may_use_a_share_of_free_memory(config: EngineConfig) -> None:
    worker = loaded(config.evolve(gpu_memory_utilization=0.5))
    memory = worker.kv_memory()
    assert memory.free_bytes == GIB // 2 - reserved_bytes(worker) < GIB // 2
    assert memory.reason == (
        "50% of the 1024 MiB that are free after loading, less 0 MiB for a step of 64 tokens and "
        "0 MiB for recorded steps of 64 tokens"
    )
    assert loaded(config, free=1000).kv_memory().free_bytes == 0
    assert memory.default_bytes is None


def test_cache_uses_half_of_free_memory_by_default(config: EngineConfig) -> None:
    for free in (GIB, 100 * GIB, 10_000 * GIB):
        worker = loaded(config, free)
        memory = worker.kv_memory()
        assert memory.default_bytes == free // 2 - reserved_bytes(worker)
        assert memory.free_bytes == int(0.92 * free) - reserved_bytes(worker)


@pytest.mark.parametrize("share", [None, 1.0])
def test_the_cache_is_never_larger_than_all_rows_can_use(share: float | None, config: EngineConfig) -> None:
    config = config.evolve(gpu_memory_utilization=share)
    worker = loaded(config, 10_000 * GIB)
    specs, limits = worker.kv_cache_specs(), config.scheduler
    kv_config = size_kv_cache(config, specs, worker.kv_memory())
    num_blocks_of_a_row = -(-config.model.max_model_len // config.cache.block_size)
    assert kv_config.num_blocks == limits.max_num_seqs * num_blocks_of_a_row + 1


def test_a_full_request_is_worth_more_than_half(config: EngineConfig) -> None:
    """A context length that was asked for outweighs the memory left to other programs by default."""
    worker = loaded(config)
    specs = worker.kv_cache_specs()
    block_bytes = sum(spec.block_bytes for spec in specs.values())
    num_blocks = config.model.max_model_len // config.cache.block_size + 1
    free = int((num_blocks * block_bytes + reserved_bytes(worker)) / 0.9)
    memory = loaded(config, free).kv_memory()
    kv_config = size_kv_cache(config, specs, memory)
    assert kv_config.num_blocks == num_blocks
    assert memory.default_bytes is not None
    assert memory.default_bytes < kv_config.bytes <= memory.free_bytes


def test_a_machine_that_will_not_give_the_cache_is_named(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the cache if a promised allocation fails, as on a system that does not overcommit."""
    worker = loaded(config)
    specs = worker.kv_cache_specs()
    with pytest.raises(StartupError, match="not enough memory for a KV cache of"):
        worker.initialize_kv_cache(KVCacheConfig(2**45, group_layers(specs, 64), dict(specs)))


def test_swap_space_is_taken_from_the_same_memory(config: EngineConfig) -> None:
    worker = loaded(config.evolve(gpu_memory_utilization=0.5, swap_space=0.25))
    assert worker.kv_memory().free_bytes == GIB * 3 // 8 - reserved_bytes(worker)


def test_swap_costs_are_measured(config: EngineConfig) -> None:
    costs = loaded(config).kv_memory().swap_costs
    assert costs.copied_bytes_per_s > 0.0
    assert costs.computed_tokens_per_s > 0.0


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_flags_that_size_the_cache(
    share: float, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From flag to allocated blocks; the engine says what it has."""
    free = 2**21
    monkeypatch.setattr(uniproc, "make_device", lambda name: FakeDevice(RoomyHost(free)))

    def started(**args: Any) -> LLMEngine:
        limits = {"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 64}
        return LLMEngine(EngineConfig.from_args(model=str(tiny_model("llama")), **limits, **args))

    engine = started(gpu_memory_utilization=share, block_size=64)
    worker = engine._clients[0]._core.executor._worker  # type: ignore[attr-defined]
    block_bytes = engine.core_ready.kv_cache_bytes // engine.core_ready.num_blocks
    assert reserved_bytes(worker) > 0
    assert engine.core_ready.num_blocks == min(
        (int(share * free) - reserved_bytes(worker)) // block_bytes, 17
    )
    assert started(kv_cache_memory_bytes=9 * block_bytes + 1, block_size=64).core_ready.num_blocks == 9
    assert started(num_gpu_blocks_override=11, gpu_memory_utilization=share).core_ready.num_blocks == 11
    with pytest.raises(ConfigError, match=r"needs 4 KV cache blocks .* memory for 3 "):
        started(num_gpu_blocks_override=4)


def generate(driver: Driver, name: str, chunk: int) -> Sequence:
    params = SamplingParams(seed=3, temperature=0.8, top_p=0.95, max_tokens=99, logprobs=2)
    driver.submit(name, [(7 * i) % 250 for i in range(21)], params)
    return driver.generate(name, 8, chunk)


def test_tiny_llama_runs_in_chunks_as_whole(config: EngineConfig) -> None:
    driver = driver_of(config)
    whole, chunked = generate(driver, "a", 1000), generate(driver, "b", 5)
    assert whole.output == chunked.output
    for one, other in zip(whole.logprobs, chunked.logprobs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_executor_is_its_worker(config: EngineConfig) -> None:
    executor = resolve_executor("uni")(config)
    assert isinstance(executor, UniprocExecutor)
    executor.load()
    specs = executor.kv_cache_specs()
    executor.initialize_kv_cache(size_kv_cache(config, specs, executor.kv_memory()))
    executor.shutdown()
    executor.shutdown()


def test_unknown_executor_is_named() -> None:
    with pytest.raises(ConfigError, match="one of uni, mp, ray, external_launcher, null, got 'rays'"):
        resolve_executor("rays")
