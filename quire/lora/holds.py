# SPDX-License-Identifier: Apache-2.0
"""Holds of requests whose adapters are still being read, so that other requests are not delayed.

Invariant: the worker has the adapter of every request without a hold, because it drops an adapter only when the core
says so, and the core only when no request uses it. Every hold ends with the adapter or its request; every returned
future is completed, within `advance`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.messages import EngineCoreRequest
from quire.engine.step_loop import Clock
from quire.errors import ValidationError
from quire.executor.base import Executor
from quire.scheduler.explain import Cause
from quire.scheduler.holds import Hold
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import Scheduler

DETAIL = "its adapter"
PATIENCE_S = 0.002


class AdapterHolds(CoreFeature):
    """Adapters of the worker, loaded and dropped so that at most `--max-cpu-loras` are kept."""

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        self._config = config.lora
        self._kept: OrderedDict[str, LoRARequest] = OrderedDict()  # least recently used first
        self._pending: dict[str, tuple[LoRARequest, Future[None]]] = {}
        self._wanted: dict[str, LoRARequest] = {}  # in order of arrival
        self._additions: dict[str, list[Future[bool]]] = {}
        self._removals: dict[str, list[Future[bool]]] = {}

    @property
    def patience_s(self) -> float | None:
        """Polling interval of an otherwise idle core; None: it need not poll."""
        return PATIENCE_S if self._pending or self._wanted else None

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {"add_lora": self.add, "remove_lora": self.remove, "list_loras": self.numbers}

    def holds_for(self, message: EngineCoreRequest) -> list[Hold]:
        """Return the holds of a request with an adapter.

        Raises:
            ValidationError: adapters are not served, or another one has this name and number.
        """
        request = message.adapter_request
        if request is None or self._has(request):
            return []
        return [Hold(f"adapter {request.key}", Cause.NOT_READY, DETAIL)]

    def add(self, fields: Any) -> Future[bool]:
        """Load an adapter, given as its `LoRARequest` or the fields of one, before a request needs it.

        The future is true once it is loaded, also if it was before; an error is the one that a request would get.
        Raises as `holds_for`.
        """
        request, added = msgspec.convert(fields, LoRARequest), Future[bool]()
        if self._has(request):
            added.set_result(True)
            return added
        self._additions.setdefault(request.key, []).append(added)
        return added

    def remove(self, number: int) -> Future[bool]:
        """Drop an adapter once no request uses it; the future is false if none has this number."""
        removed = Future[bool]()
        key = next((key for key, known in self._all().items() if known.lora_int_id == number), None)
        if key is None:
            removed.set_result(False)
        else:
            self._removals.setdefault(key, []).append(removed)
        return removed

    def numbers(self) -> list[int]:
        """Return the numbers of the loaded adapters."""
        return sorted(request.lora_int_id for request in self._kept.values())

    def _has(self, request: LoRARequest) -> bool:
        """Return whether an adapter is loaded; if not, start loading it. Raises as `holds_for`."""
        if not self._config.enable_lora:
            raise ValidationError("adapters are not served here (--enable-lora)", param="lora_request")
        key, known = request.key, self._all().get(request.key)
        if known is not None and known != request:
            raise ValidationError(
                f"adapter {request.lora_name!r} with number {request.lora_int_id} exists already, with another path or "
                "other files",
                param="lora_request",
            )
        if key in self._kept:
            self._kept.move_to_end(key)
            return True
        if known is None:
            self._wanted[key] = request
            self._begin()
        return False

    def _all(self) -> dict[str, LoRARequest]:
        """Return all adapters by key: loaded, being read and waiting to be read."""
        reading = {key: request for key, (request, _) in self._pending.items()}
        return {**self._kept, **reading, **self._wanted}

    @property
    def has_work(self) -> bool:
        is_read = any(future.done() for _, future in self._pending.values())
        return is_read or (bool(self._wanted) and self._has_room()) or bool(self._unwanted())

    def advance(self) -> list[RequestUpdate]:
        """Release requests whose adapters are loaded; return the ends of those whose adapters failed."""
        ends: list[RequestUpdate] = []
        now = self._clock()
        for key in [key for key, (_, future) in self._pending.items() if future.done()]:
            request, future = self._pending.pop(key)
            failure = future.exception()
            added = self._additions.pop(key, [])
            if failure is None:
                self._kept[key] = request
                self._scheduler.release(f"adapter {key}", now)
                _resolve(added)
                continue
            if not isinstance(failure, ValidationError):
                raise failure
            self._executor.drop_adapter(key)  # other ranks may have read it
            for one in added:
                one.set_exception(failure)
            ids = self._scheduler.adapted().get(key, [])
            for update in self._scheduler.finish_requests(ids, "error", now):
                update.error, update.refused = failure.message, True
                ends.append(update)
        for key in self._unwanted():
            if self._kept.pop(key, None) is not None:
                self._executor.drop_adapter(key)
            _resolve(self._removals.pop(key))
        self._begin()
        return ends

    def _unwanted(self) -> list[str]:
        """Return adapters to remove that no request uses or waits for."""
        if not self._removals:
            return []
        adapted = self._scheduler.adapted()
        return [
            key
            for key in self._removals
            if key not in adapted and key not in self._pending and key not in self._wanted
        ]

    def _begin(self) -> None:
        """Start reading adapters as far as there is room; unused ones make room."""
        while self._wanted and self._has_room():
            if self._is_full():
                unused = self._unused()
                assert unused is not None, "there is room"
                del self._kept[unused]
                self._executor.drop_adapter(unused)
            key = next(iter(self._wanted))
            request = self._wanted.pop(key)
            self._pending[key] = request, self._executor.prepare_adapter(request)

    def _has_room(self) -> bool:
        return not self._is_full() or self._unused() is not None

    def _is_full(self) -> bool:
        return len(self._kept) + len(self._pending) >= self._config.num_kept

    def _unused(self) -> str | None:
        """Return the least recently used adapter without a request."""
        adapted = self._scheduler.adapted()
        return next((key for key in self._kept if key not in adapted), None)


def _resolve(futures: list[Future[bool]]) -> None:
    for future in futures:
        future.set_result(True)
