# SPDX-License-Identifier: Apache-2.0
"""A scheduler and a null executor, driven as the engine core drives them, with every promise checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.executor.null import NullExecutor
from quire.kv_cache.spec import (
    ChunkedLocalSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from quire.sampling_params import SamplingParams
from quire.scheduler.holds import Hold
from quire.scheduler.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler

VOCAB_SIZE = 40
REQUEST_FIELDS = (
    "eos_token_ids", "cache_salt", "priority", "tenant", "fork_of", "pooling_params", "output_token_ids", "search",
    "second_text_start", "adapter_request", "media",
)  # fmt: skip

ALONE_FIELDS = ("eos_token_ids", "cache_salt", "pooling_params", "adapter_request", "media")
"""Those that a request has in an engine of its own, too."""


def make_config(**changes: Any) -> EngineConfig:
    """A small engine: 4 rows, 16 tokens a step, blocks of 4 tokens, contexts up to 64."""
    fields = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "max_model_len": 64,
        "num_gpu_blocks_override": 65,
        "max_multi_step_s": 1000.0,  # steps take half a second here
    }
    return EngineConfig.from_args(**{**fields, **changes})


def make_spec(kind: str, block_size: int) -> KVCacheSpec:
    """A layer of a kind: "full", or a name and a number: "window 5", "chunk 6", "state 2", "encoder 64"."""
    name, _, number = kind.partition(" ")
    if name == "state":
        return RecurrentStateSpec(block_size, state_bytes=64, checkpoint_blocks=int(number))
    if name == "encoder":
        return EncoderOnlySpec(int(number))
    if name == "window":
        return SlidingWindowSpec(block_size, 1, 8, 4, sliding_window=int(number))
    if name == "chunk":
        return ChunkedLocalSpec(block_size, 1, 8, 4, attention_chunk=int(number))
    return FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype_bytes=4)


def make_kv_config(
    config: EngineConfig, num_groups: int = 1, kinds: Sequence[str] = ("full",), num_host_blocks: int = 0
) -> KVCacheConfig:
    """`num_groups` groups of one layer each, which share the pool; their kinds are taken in turn."""
    names = [f"layers.{i}" for i in range(num_groups)]
    specs = {name: make_spec(kinds[i % len(kinds)], config.cache.block_size) for i, name in enumerate(names)}
    groups = tuple(KVCacheGroup((name,), spec) for name, spec in specs.items())
    return KVCacheConfig(config.cache.num_gpu_blocks_override, groups, specs, num_host_blocks)


class Engine:
    """Runs steps and collects, per request, what a front end would have received."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        num_groups: int = 1,
        kinds: Sequence[str] = ("full",),
        num_host_blocks: int = 0,
        max_drafts: int = 0,
    ) -> None:
        self.config = config or make_config()
        kv_config = make_kv_config(self.config, num_groups, kinds, num_host_blocks)
        self.executor = NullExecutor(
            self.config, specs=kv_config.layer_specs, vocab_size=VOCAB_SIZE, max_drafts=max_drafts
        )
        self.executor.initialize_kv_cache(kv_config)
        self.scheduler = Scheduler(self.config, kv_config)
        self.requests: dict[str, Request] = {}
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.plans: list[SchedulerOutput] = []
        self.lacks: dict[str, set[str]] = {}
        self.now = 100.0

    def add(
        self, request_id: str, prompt: Sequence[int], lacks: Sequence[str] = (), **fields: Any
    ) -> Request:
        """Queue a request, which may lack something; keywords that are no field of it are sampling parameters."""
        own = {name: fields.pop(name) for name in REQUEST_FIELDS if name in fields}
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**{"max_tokens": 8, **fields}),
            **own,
        )
        if request.adapter_request is not None:
            self.executor.prepare_adapter(request.adapter_request)
        self.executor.encode_media(request.media, math.inf)
        self.scheduler.add_request(request, self.now, [Hold(key, detail=key) for key in lacks])
        self.requests[request_id], self.updates[request_id] = request, []
        self.lacks[request_id] = set(lacks)
        return request

    def hold(self, request_id: str, key: str) -> bool:
        """A request that waits comes to lack something more."""
        held = self.scheduler.hold(request_id, Hold(key, detail=key), self.now)
        self.lacks[request_id] |= {key} if held else set()
        return held

    def release(self, key: str) -> None:
        """Release the requests that were held for a key."""
        self.scheduler.release(key, self.now)
        for lacks in self.lacks.values():
            lacks.discard(key)
        self.scheduler.check_integrity()

    def step(self) -> SchedulerOutput:
        """One step, with the checks that hold after every one."""
        plan = self.schedule()
        if not plan.is_empty:
            self.finish_step(plan, self.executor.execute_model(plan))
        return plan

    def fail(self, name: str) -> None:
        """One step, in which the numbers of a request turn out to be unusable, if it computes any."""
        plan = self.schedule()
        output = self.executor.execute_model(plan)
        self.finish_step(plan, failing(output, name) if name in plan.num_scheduled_tokens else output)

    def schedule(self) -> SchedulerOutput:
        had_ready = self.has_ready()
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        assert not had_ready or plan.total_num_scheduled_tokens > 0, "a step without progress"
        assert not any(self.lacks.get(name) for name in plan.num_scheduled_tokens), (
            "a held request was planned"
        )
        assert plan.total_num_scheduled_tokens <= self.config.scheduler.max_num_batched_tokens
        assert self.scheduler.stats().num_running <= self.config.scheduler.max_num_seqs
        self.plans.append(plan)
        return plan

    def has_ready(self) -> bool:
        """Whether there is a request that lacks nothing, neither itself nor through the parent it waits for."""
        stats = self.scheduler.stats()
        unfinished = [request for request in self.requests.values() if not request.is_finished]
        assert stats.num_running + stats.num_waiting == len(unfinished), "those who are held wait, too"
        return any(not self._lacks_something(request) for request in unfinished)

    def _lacks_something(self, request: Request) -> bool:
        parent = request.parent
        waits = parent is not None and not parent.is_finished and parent.num_output_tokens == 0
        return bool(self.lacks[request.request_id]) or (waits and self._lacks_something(parent))

    def finish_step(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        self.collect(self.scheduler.update_from_output(plan, output, self.now + 0.5))
        self.scheduler.check_integrity()

    def abort(self, *request_ids: str) -> list[RequestUpdate]:
        updates = self.scheduler.finish_requests(request_ids, "abort", self.now)
        self.collect(updates)
        self.scheduler.check_integrity()
        return updates

    def collect(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            history = self.updates[update.request_id]
            assert not any(earlier.finish_reason for earlier in history), "an update after the last"
            if not history or update.finish_reason:
                assert update.queued_ts > 0.0
            history.append(update)

    def drain(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left; then the cache must be empty-handed and every row freed."""
        while self.scheduler.has_work():
            assert max_steps > 0, "the engine does not come to an end"
            max_steps -= 1
            self.step()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        assert stats.host_cache_usage == 0.0

    def preempted(self, plan: SchedulerOutput) -> list[str]:
        """Requests that lost their rows in this plan and come back in a later one."""
        later = [data.request_id for p in self.plans if p.step_id > plan.step_id for data in p.new_requests]
        return [name for name in plan.removed_request_ids if name in later]

    def tokens(self, request_id: str) -> list[int]:
        return [token for update in self.updates[request_id] for token in update.new_token_ids]

    def last(self, request_id: str) -> RequestUpdate:
        return self.updates[request_id][-1]


def failing(output: ModelRunnerOutput, name: str) -> ModelRunnerOutput:
    """The result of a step, had the numbers of one of its requests been unusable."""
    sampled, pooled = (
        {key: value for key, value in results.items() if key != name}
        for results in (output.sampled_token_ids, output.pooled)
    )
    failed = {name: "logits are not finite"}
    return msgspec.structs.replace(output, sampled_token_ids=sampled, pooled=pooled, failed=failed)


def run_alone(request: Request, config: EngineConfig) -> RequestUpdate:
    """Return a request's result in an engine of its own, with room and a token budget for all of it."""
    roomy = config.evolve(
        num_gpu_blocks_override=1000, max_num_batched_tokens=1000, enable_prefix_caching=False
    )
    engine = Engine(roomy)
    params = request.sampling_params
    own = {name: getattr(request, name) for name in ALONE_FIELDS}
    copy = Request(request_id="r", prompt_token_ids=request.prompt_token_ids, sampling_params=params, **own)
    if request.adapter_request is not None:
        engine.executor.prepare_adapter(request.adapter_request)
    engine.executor.encode_media(request.media, math.inf)
    engine.requests["r"], engine.updates["r"], engine.lacks["r"] = copy, [], set()
    engine.scheduler.add_request(copy, engine.now)
    engine.drain()
    last = engine.last("r")
    return RequestUpdate("r", engine.tokens("r"), last.finish_reason, last.stop_reason, pooled=last.pooled)
