# SPDX-License-Identifier: Apache-2.0
"""Holds of requests whose grammars are being compiled, so that other requests are not delayed.

Invariant: every hold is released, even if its grammar cannot be compiled; then the worker fails its request.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.messages import EngineCoreRequest
from quire.engine.step_loop import Clock
from quire.engine.tokenizer_cache import load_vocabulary
from quire.executor.base import Executor
from quire.scheduler.explain import Cause
from quire.scheduler.holds import Hold
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import Scheduler

DETAIL = "its grammar"
PATIENCE_S = 0.002


class GrammarHolds(CoreFeature):
    """Grammars that the executor is preparing."""

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        executor.use_vocabulary(partial(load_vocabulary, config))
        self._pending: dict[str, Future[None]] = {}
        self._keys: dict[bytes, str] = {}
        self._num_holds = 0

    @staticmethod
    def is_wanted(config: EngineConfig) -> bool:
        return config.pooling is None

    @property
    def patience_s(self) -> float | None:
        """Polling interval of an otherwise idle core; None: it need not poll."""
        return PATIENCE_S if self._pending else None

    def holds_for(self, message: EngineCoreRequest) -> list[Hold]:
        wanted = message.sampling_params.structured_outputs
        if wanted is None:
            return []
        name = self._keys.get(wanted.key)
        if name is None:
            future = self._executor.prepare_grammar(wanted)
            if future.done():
                return []
            self._num_holds += 1
            name = self._keys[wanted.key] = f"grammar {self._num_holds}"
            self._pending[name] = future
        return [Hold(name, Cause.NOT_READY, DETAIL)]

    @property
    def has_work(self) -> bool:
        return any(future.done() for future in self._pending.values())

    def advance(self) -> list[RequestUpdate]:
        """Release requests whose grammars are ready."""
        for name in [name for name, future in self._pending.items() if future.done()]:
            self._pending.pop(name).result()  # raises only on an internal bug
            self._scheduler.release(name, self._clock())
        self._keys = {key: name for key, name in self._keys.items() if name in self._pending}
        return []
