"""Requests whose adapters are still being read are held, and stand in nobody's way meanwhile.

Invariant: the worker has the adapter of every request that is not held, because it lets go of an adapter only when the
core says so, and the core only when no request has it. Every hold ends: with the adapter, or with its request; and
every future that is given out is done in the end, within `release_ready`.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import msgspec

from quire.config.lora import LoRAConfig
from quire.errors import ValidationError
from quire.executor.base import Executor
from quire.lora_request import LoRARequest
from quire.scheduler.explain import Cause
from quire.scheduler.holds import Hold
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import Scheduler

DETAIL = "its adapter"
PATIENCE_S = 0.002


class AdapterHolds:
    """Knows which adapters the worker has, and has it read others, of which it keeps `--max-cpu-loras`."""

    def __init__(self, config: LoRAConfig, executor: Executor, scheduler: Scheduler) -> None:
        self._config = config
        self._executor = executor
        self._scheduler = scheduler
        self._kept: OrderedDict[str, LoRARequest] = OrderedDict()  # the one that was wanted longest ago first
        self._pending: dict[str, tuple[LoRARequest, Future[None]]] = {}
        self._wanted: dict[str, LoRARequest] = {}  # in the order in which they came
        self._additions: dict[str, list[Future[bool]]] = {}
        self._removals: dict[str, list[Future[bool]]] = {}

    @property
    def patience_s(self) -> float | None:
        """How long a core that has nothing else to do may wait before it looks again; None: until it is told."""
        return PATIENCE_S if self._pending or self._wanted else None

    def of(self, request: LoRARequest | None) -> list[Hold]:
        """What a request with this adapter has to wait for.

        Raises:
            ValidationError: no adapters are served, or another one has this name and number.
        """
        if request is None or self._has(request):
            return []
        return [Hold(f"adapter {request.key}", Cause.NOT_READY, DETAIL)]

    def add(self, fields: Any) -> Future[bool]:
        """Read an adapter, given as its `LoRARequest` or the fields of one, before a request wants it.

        The future is true when it is there, also if it was before; or its error says, as for a request, why it cannot
        be used. Raises as `of`.
        """
        request, added = msgspec.convert(fields, LoRARequest), Future[bool]()
        if self._has(request):
            added.set_result(True)
            return added
        self._additions.setdefault(request.key, []).append(added)
        return added

    def remove(self, number: int) -> Future[bool]:
        """Let go of an adapter as soon as no request has it; the future is false if there is none of this number."""
        removed = Future[bool]()
        key = next((key for key, known in self._all().items() if known.lora_int_id == number), None)
        if key is None:
            removed.set_result(False)
        else:
            self._removals.setdefault(key, []).append(removed)
        return removed

    def numbers(self) -> list[int]:
        """Of the adapters that are there."""
        return sorted(request.lora_int_id for request in self._kept.values())

    def _has(self, request: LoRARequest) -> bool:
        """Whether an adapter is there; if not, it will be read. Raises as `of`."""
        if not self._config.enable_lora:
            raise ValidationError("adapters are not served here (--enable-lora)", param="lora_request")
        key, known = request.key, self._all().get(request.key)
        if known is not None and known != request:
            raise ValidationError(
                f"adapter {request.lora_name!r} has the number {request.lora_int_id} already, with another path or "
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
        """By key, those that are there, being read or to be read."""
        reading = {key: request for key, (request, _) in self._pending.items()}
        return {**self._kept, **reading, **self._wanted}

    @property
    def any_ready(self) -> bool:
        """Whether `release_ready` has something to do."""
        is_read = any(future.done() for _, future in self._pending.values())
        return is_read or (bool(self._wanted) and self._has_room()) or bool(self._unwanted())

    def release_ready(self, now: float) -> list[RequestUpdate]:
        """Let go of those whose adapters are there; returns the ends of those whose adapters cannot be used."""
        ends: list[RequestUpdate] = []
        for key in [key for key, (_, future) in self._pending.items() if future.done()]:
            request, future = self._pending.pop(key)
            failure = future.exception()
            added = self._additions.pop(key, [])
            if failure is None:
                self._kept[key] = request
                self._scheduler.release(f"adapter {key}", now)
                _settle(added)
                continue
            if not isinstance(failure, ValidationError):
                raise failure
            self._executor.drop_adapter(key)  # other ranks may have been able to read it
            for one in added:
                one.set_exception(failure)
            ids = self._scheduler.adapted().get(key, [])
            for update in self._scheduler.finish_requests(ids, "error", now):
                update.error, update.refused = failure.message, True
                ends.append(update)
        for key in self._unwanted():
            if self._kept.pop(key, None) is not None:
                self._executor.drop_adapter(key)
            _settle(self._removals.pop(key))
        self._begin()
        return ends

    def _unwanted(self) -> list[str]:
        """Adapters that are to go, and that nobody has or waits for any more."""
        if not self._removals:
            return []
        adapted = self._scheduler.adapted()
        return [
            key
            for key in self._removals
            if key not in adapted and key not in self._pending and key not in self._wanted
        ]

    def _begin(self) -> None:
        """Have adapters read, as far as there is room for them, which those make that no request has."""
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
        """The adapter that no request has for the longest time."""
        adapted = self._scheduler.adapted()
        return next((key for key in self._kept if key not in adapted), None)


def _settle(futures: list[Future[bool]]) -> None:
    for future in futures:
        future.set_result(True)
