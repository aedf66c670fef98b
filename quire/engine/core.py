"""`EngineCore`: one scheduler, one executor, and the step that joins them.

Invariant: only this module owns both columns of the system. It knows token ids and blocks, never text, HTTP or
processes; whoever holds it calls `handle` for each message and `step` while there is work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine.messages import (
    AbortRequests,
    CoreMessage,
    CoreReady,
    CoreRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
    UtilityResult,
)
from quire.errors import ClientError, ConfigError
from quire.executor.base import Executor
from quire.executor.registry import resolve_executor
from quire.kv_cache.spec import KVCacheConfig, bytes_per_block, group_layers
from quire.scheduler.explain import Explanation
from quire.scheduler.output import RequestUpdate
from quire.scheduler.registry import resolve_scheduler
from quire.scheduler.request import Request

logger = logging.getLogger(__name__)

MIB = 2**20


class EngineCore:
    """Loads the model, sizes the cache, then turns requests into updates step by step.

    Raises:
        StartupError: the model cannot be loaded, or memory does not suffice for one request.
    """

    def __init__(self, config: EngineConfig) -> None:
        started = time.monotonic()
        scheduler_class = resolve_scheduler(config.scheduler.scheduler_cls)
        self.executor: Executor = resolve_executor(config.parallel.distributed_executor_backend)(config)
        self.executor.load()
        kv_config = size_kv_cache(config, self.executor)
        self.executor.initialize_kv_cache(kv_config)
        self.scheduler = scheduler_class(config, kv_config)
        self.utilities: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "check_integrity": self.scheduler.check_integrity,
            "stats": self.scheduler.stats,
            "explain": self.explain,
        }
        self._refused: list[RequestUpdate] = []
        self.ready = CoreReady(
            num_blocks=kv_config.num_blocks,
            block_size=config.cache.block_size,
            kv_cache_bytes=kv_config.bytes,
            load_s=time.monotonic() - started,
        )

    def has_work(self) -> bool:
        """True while a step would do something."""
        return bool(self._refused) or self.scheduler.has_work()

    def step(self) -> EngineCoreOutputs:
        """schedule -> execute -> update; returns every request's news."""
        plan = self.scheduler.schedule(time.monotonic())
        output = self.executor.execute_model(plan)
        now = time.monotonic()
        updates = self._refused + self.scheduler.update_from_output(plan, output, now)
        self._refused = []
        return EngineCoreOutputs(updates, self.scheduler.stats(), now)

    def handle(self, message: CoreRequest) -> CoreMessage | None:
        """Act on one message; only utility calls have an answer."""
        if isinstance(message, EngineCoreRequest):
            self.add_request(message)
        elif isinstance(message, AbortRequests):
            self.scheduler.finish_requests(message.request_ids, "abort", time.monotonic())
        elif isinstance(message, UtilityCall):
            return self._call_utility(message)
        return None

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; one that can never run ends with an error at the next step, and costs only itself."""
        try:
            self.scheduler.add_request(Request(**msgspec.structs.asdict(message)), time.monotonic())
        except ClientError as error:
            self._refused.append(
                RequestUpdate(message.request_id, [], finish_reason="error", error=str(error))
            )

    def explain(self, request_id: str) -> Explanation | None:
        """Why a request waits or waited; None if the core does not know it."""
        return self.scheduler.explain(request_id, time.monotonic())

    def shutdown(self) -> None:
        self.executor.shutdown()

    def _call_utility(self, call: UtilityCall) -> UtilityResult:
        if call.method not in self.utilities:
            return UtilityResult(call.call_id, error=f"the core has no utility {call.method!r}")
        result = self.utilities[call.method](*call.args)
        return UtilityResult(call.call_id, result=msgspec.to_builtins(result))


def size_kv_cache(config: EngineConfig, executor: Executor) -> KVCacheConfig:
    """Number of blocks from the memory that is really left, logged with what it allows.

    Raises:
        ConfigError: not even one request of `max_model_len` tokens fits.
    """
    specs = executor.kv_cache_specs()
    groups = group_layers(specs)
    block_bytes = bytes_per_block(specs)
    num_blocks = config.cache.num_gpu_blocks_override or executor.available_kv_bytes() // block_bytes
    per_request = groups[0].spec.max_blocks(config.model.max_model_len)
    usable = num_blocks - 1
    tokens = usable * config.cache.block_size
    if usable < per_request:
        raise ConfigError(
            f"the KV cache has room for {max(tokens, 0)} tokens ({max(usable, 0)} blocks of {block_bytes} bytes), but "
            f"one request of --max-model-len {config.model.max_model_len} needs {per_request} blocks "
            f"({per_request * block_bytes / MIB:.0f} MiB): lower --max-model-len or raise --kv-cache-memory-bytes"
        )
    logger.info(
        "KV cache: %d blocks, %.1f MiB, %d tokens: %.1f requests of %d tokens at once",
        num_blocks,
        num_blocks * block_bytes / MIB,
        tokens,
        usable / per_request,
        config.model.max_model_len,
    )
    return KVCacheConfig(num_blocks=num_blocks, groups=groups, layer_specs=dict(specs))
