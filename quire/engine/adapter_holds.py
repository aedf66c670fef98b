"""Requests whose adapters are still being read are held, and stand in nobody's way meanwhile.

Invariant: the worker has the adapter of every request that is not held, because it lets go of an adapter only when the
core says so, and the core only when no request has it. Every hold ends: with the adapter, or with its request.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future

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

    @property
    def patience_s(self) -> float | None:
        """How long a core that has nothing else to do may wait before it looks again; None: until it is told."""
        return PATIENCE_S if self._pending or self._wanted else None

    def of(self, request: LoRARequest | None) -> list[Hold]:
        """What a request with this adapter has to wait for.

        Raises:
            ValidationError: no adapters are served, or another one has this name and number.
        """
        if request is None:
            return []
        if not self._config.enable_lora:
            raise ValidationError("adapters are not served here (--enable-lora)", param="lora_request")
        key, known = request.key, self._known(request.key)
        if known is not None and known != request:
            raise ValidationError(
                f"adapter {request.lora_name!r} has the number {request.lora_int_id} already, with another path",
                param="lora_request",
            )
        if key in self._kept:
            self._kept.move_to_end(key)
            return []
        if known is None:
            self._wanted[key] = request
            self._begin()
        return [Hold(f"adapter {key}", Cause.NOT_READY, DETAIL)]

    def _known(self, key: str) -> LoRARequest | None:
        """The adapter of a key that is there, being read or to be read."""
        pending = self._pending.get(key)
        return pending[0] if pending is not None else self._kept.get(key) or self._wanted.get(key)

    @property
    def any_ready(self) -> bool:
        """Whether `release_ready` has something to do."""
        is_read = any(future.done() for _, future in self._pending.values())
        return is_read or (bool(self._wanted) and self._has_room())

    def release_ready(self, now: float) -> list[RequestUpdate]:
        """Let go of those whose adapters are there; returns the ends of those whose adapters cannot be used."""
        ends: list[RequestUpdate] = []
        for key in [key for key, (_, future) in self._pending.items() if future.done()]:
            request, future = self._pending.pop(key)
            failure = future.exception()
            if failure is None:
                self._kept[key] = request
                self._scheduler.release(f"adapter {key}", now)
                continue
            if not isinstance(failure, ValidationError):
                raise failure
            ids = self._scheduler.adapted().get(key, [])
            for update in self._scheduler.finish_requests(ids, "error", now):
                update.error = failure.message
                ends.append(update)
        self._begin()
        return ends

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
