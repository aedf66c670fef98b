# SPDX-License-Identifier: Apache-2.0
"""An engine core in this process, driven with token ids: what the checks and measurements of whole engines share.

Invariant: it is the core that a server runs, scheduler and worker included; no tokenizer, no front end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.target import Target
from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests, EngineCoreRequest
from quire.engine.sleep_state import MEMORY_TAGS
from quire.engine.startup import prepare
from quire.executor.ranks.multiproc import MultiprocExecutor
from quire.executor.ranks.rank_processes import HostStarter
from quire.sampling_params import SamplingParams

Prompt = Sequence[int]


@dataclass
class Generated:
    """Output of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the chosen tokens, if they were asked for."""
    finish_reason: str | None = None


def greedy(num_tokens: int, **params: Any) -> SamplingParams:
    """Parameters of a request that generates exactly so many tokens."""
    return SamplingParams(**({"temperature": 0.0} | params), max_tokens=num_tokens, ignore_eos=True)


class Engine:
    """A running core and the requests it was given."""

    def __init__(self, target: Target, model_dir: Path, **args: Any) -> None:
        defaults: dict[str, Any] = {
            "device": target.device.type,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 4096,
        }
        config = EngineConfig.from_args(**defaults | args | {"model": str(model_dir)})
        self._core = EngineCore(prepare(config, "offline"))
        self._requests: dict[str, Generated] = {}

    def add(self, prompt: Prompt, params: SamplingParams, adapter: LoRARequest | None = None) -> Generated:
        """Queue a request; what it gets appears in the result."""
        request_id = str(len(self._requests))
        self._requests[request_id] = Generated()
        self._core.add_request(
            EngineCoreRequest(request_id, list(prompt), params, time.monotonic(), adapter_request=adapter)
        )
        return self._requests[request_id]

    def step(self) -> int:
        """One turn of the loop; returns the number of tokens that came out."""
        count = 0
        for update in self._core.step().updates:
            if update.error is not None:
                raise RuntimeError(f"request {update.request_id} failed: {update.error}")
            request = self._requests[update.request_id]
            request.token_ids += update.new_token_ids
            request.logprobs += [entry.logprobs[0] for entry in update.logprobs or ()]
            request.finish_reason = update.finish_reason
            count += len(update.new_token_ids)
        return count

    def has_work(self) -> bool:
        return self._core.has_work()

    def finish(self) -> None:
        """Step until nothing is left to do."""
        while self.has_work():
            self.step()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[Generated]:
        """All requests in one batch, to their end; each with its adapter, if there are any."""
        pairs = zip(prompts, adapters or [None] * len(prompts), strict=True)
        requests = [self.add(prompt, params, adapter) for prompt, adapter in pairs]
        self.finish()
        return requests

    def abort(self) -> None:
        """End what still runs."""
        running = [name for name, request in self._requests.items() if request.finish_reason is None]
        self._core.handle(AbortRequests(running))
        self.finish()

    def check_integrity(self) -> float:
        """Raises if blocks are lost or held twice; returns the share of the cache that is in use."""
        self._core.utilities["check_integrity"]()
        return float(self._core.scheduler.stats().kv_cache_usage)

    def num_swapped(self) -> int:
        """Return how often a request's blocks were swapped out to host memory."""
        return int(self._core.scheduler.stats().num_swaps)

    def sleep(self) -> None:
        """Give the device's memory back, and take it again."""
        self._core.utilities["sleep"](1)
        self._core.utilities["wake_up"](MEMORY_TAGS)

    def pid_of_rank(self, rank: int) -> int:
        """The process of one of several."""
        executor = self._core.executor
        assert isinstance(executor, MultiprocExecutor), "one rank has no process of its own"
        assert isinstance(executor._starter, HostStarter)
        return executor._starter.pids[rank]

    def close(self) -> None:
        self._core.shutdown()


@contextmanager
def engine(target: Target, model_dir: Path, **args: Any) -> Iterator[Engine]:
    """An engine for the length of a block; its memory is free afterwards."""
    running = Engine(target, model_dir, **args)
    try:
        yield running
    finally:
        running.close()
        del running
        release(target)


def release(target: Target) -> None:
    """Give back what nobody holds any more."""
    import gc

    gc.collect()
    if target.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
