"""The worker and its executor with a real, tiny Llama."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor.registry import resolve_executor
from quire.executor.uniproc import UniprocExecutor
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.sizing import size_kv_cache
from quire.kv_cache.spec import KVCacheConfig
from quire.sampling_params import SamplingParams
from quire.worker.cpu import CpuDevice
from quire.worker.worker import Worker
from tests.models.harness import prepared_config
from tests.worker.harness import Driver, Sequence

GIB = 2**30
NUM_BLOCKS = 40


class FakeDevice(CpuDevice):
    """A CPU with a given amount of free memory, whose threads are left alone."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self._free = free

    def start(self, config: EngineConfig) -> None:
        return None

    def available_bytes(self) -> int:
        return self._free


@pytest.fixture
def config(tiny_model: Callable[[str], Path]) -> EngineConfig:
    return prepared_config(tiny_model("llama"), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)


def loaded(config: EngineConfig, free: int = GIB) -> Worker:
    worker = Worker(config, FakeDevice(free))
    worker.load()
    return worker


def driver_of(config: EngineConfig) -> Driver:
    worker = loaded(config)
    specs = worker.kv_cache_specs()
    worker.initialize_kv_cache(KVCacheConfig(NUM_BLOCKS, group_layers(specs, 64), dict(specs)))
    assert worker._runner is not None
    return Driver(worker._runner, num_blocks=NUM_BLOCKS)


def test_cache_may_take_a_share_of_what_is_free(config: EngineConfig) -> None:
    memory = loaded(config.evolve(gpu_memory_utilization=0.5), free=10_000).kv_memory()
    assert memory.free_bytes == 5_000
    assert memory.reason.startswith("50% of")
    assert memory.default_bytes == CpuDevice.default_cache_bytes


def test_swap_space_is_taken_from_the_same_memory(config: EngineConfig) -> None:
    swapping = config.evolve(gpu_memory_utilization=0.5, swap_space=4_000 / GIB)
    assert loaded(swapping, free=10_000).kv_memory().free_bytes == 3_000


def test_swap_costs_are_measured(config: EngineConfig) -> None:
    costs = loaded(config).kv_memory().swap_costs
    assert costs.copied_bytes_per_s > 0.0
    assert costs.computed_tokens_per_s > 0.0


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
    with pytest.raises(ConfigError, match="one of uni, null, got 'ray'"):
        resolve_executor("ray")
