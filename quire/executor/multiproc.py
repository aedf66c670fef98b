"""The executor with a process for each rank, on this host and on those that join it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.errors import EngineError, StartupError
from quire.executor.base import Executor
from quire.executor.host_share import memory_of_ranks
from quire.executor.ranks import Answers, Ranks
from quire.executor.starter import HostStarter, Starter
from quire.kv_cache.plain import decode_specs, encode_kv_config
from quire.kv_cache.spec import KVCacheConfig, KVCacheSpec, KVMemory
from quire.lora_request import LoRARequest
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.vocabulary import Vocabulary


class MultiprocExecutor(Executor):
    """Tells all ranks the same, and takes results from the first of the last stage."""

    starter_type: type[Starter] = HostStarter

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._size = config.parallel.num_ranks
        self._stages: tuple[tuple[str, ...], ...] = ()
        """Layers of each with something in the cache, once they are known."""
        self._starter = self.starter_type(config, self._size)
        self._ranks = Ranks(self._starter)
        self._vocabulary: Callable[[], Vocabulary] | None = None
        self._background: ThreadPoolExecutor | None = None
        self._level = 1

    def load(self) -> None:
        place = self._all("open_store")[0] if self._starter.meet_by_network() else None
        self._all("load", place)
        self._starter.have_met()

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        wanted, shares = self._all("kv_cache_specs"), self.config.parallel.tensor_parallel_size
        stages = [wanted[first : first + shares] for first in range(0, self._size, shares)]
        if any(other != first for first, *others in stages for other in others):
            raise EngineError("ranks want different caches")
        self._stages = tuple(tuple(first) for first, *_ in stages)
        return decode_specs({name: spec for first, *_ in stages for name, spec in first.items()})

    def kv_memory(self) -> KVMemory:
        """What each rank may take: all of a host see the same free memory, and have an equal part of it."""
        found = [msgspec.convert(plain, KVMemory) for plain in self._all("kv_memory")]
        return replace(memory_of_ranks(found, self._starter.num_beside()), stages=self._stages)

    def initialize_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self._all("initialize_kv_cache", encode_kv_config(kv_config))

    def submit(self, plan: SchedulerOutput) -> None:
        self._ranks.step(plan)

    def collect(self) -> ModelRunnerOutput:
        return self._ranks.output()

    def take_part(self) -> None:
        self._all("take_part")

    def sleep(self, level: int) -> None:
        self._all("sleep", level)
        self._level = level

    def wake_up(self, tag: str) -> None:
        try:
            self._all("wake_up", tag)
        except StartupError:
            self._all("sleep", self._level if tag == "weights" else 1)  # those that have woken
            raise

    def use_vocabulary(self, source: Callable[[], Vocabulary]) -> None:
        self._vocabulary = source

    def prepare_grammar(self, params: StructuredOutputsParams) -> Future[None]:
        """Ranks are told the vocabulary with the first grammar, in the background: reading it takes its time."""
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "quire-vocabulary")
        prepared = Answers(self._ranks)
        self._background.submit(self._prepare_grammar, params, prepared)
        return prepared

    def prepare_adapter(self, request: LoRARequest) -> Future[None]:
        return self._ranks.call("prepare_adapter", msgspec.to_builtins(request))

    def drop_adapter(self, key: str) -> None:
        self._all("drop_adapter", key)

    def shutdown(self) -> None:
        if self._background is not None:
            self._background.shutdown()
        self._ranks.close()

    def _all(self, method: str, *args: Any) -> list[Any]:
        """What each rank returns."""
        answers: list[Any] = self._ranks.call(method, *args).result()
        return answers

    def _prepare_grammar(self, params: StructuredOutputsParams, prepared: Answers) -> None:
        try:
            if self._vocabulary is not None:
                self._ranks.call("use_vocabulary", msgspec.to_builtins(self._vocabulary()))
                self._vocabulary = None
        except Exception as error:  # whoever waits for the grammar hears of it
            prepared.set_exception(error)
        else:
            self._ranks.call("prepare_grammar", msgspec.to_builtins(params), answers=prepared)
