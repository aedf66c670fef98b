# SPDX-License-Identifier: Apache-2.0
"""The router's owner of models: executes the planner's actions, and gives requests their model's server.

Invariant: single-threaded, one event loop. Every change of a model's state goes through `RouterPlanner`; each of its
actions runs in a task of its own and ends in exactly one report. Only the watcher of a child reports its end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from quire.errors import ConflictError, QuireError
from quire.model_router.child import Child, Starter
from quire.model_router.child_http import ChildLostError
from quire.model_router.memory import PROCESS_BYTES, Estimate
from quire.model_router.metrics import RouterMetrics
from quire.model_router.models_file import ModelEntry, Models
from quire.model_router.planner import (
    CHANGING,
    MIB,
    Action,
    Admit,
    LoadModel,
    Measure,
    ModelPhase,
    ModelRules,
    ModelState,
    Refuse,
    RouterPlanner,
    Suspend,
    Unload,
    Wake,
)

logger = logging.getLogger(__name__)

STOP_GRACE_S = 10.0  # Time beyond a child's own patience, after which it is killed.
POLL_S = 0.1
MAX_EVENTS = 1024  # State changes that a slow subscriber may be behind.
T = TypeVar("T")
Flags = Callable[[ModelEntry, Estimate], Mapping[str, Any]]


@dataclass(frozen=True)
class RouterSettings:
    """Settings of the owner of models.

    Attributes:
        load_timeout_s: time that a model may take to load.
        stop_timeout_s: time that a child has to end its requests.
        keeps_spare: whether a process without a model is kept ready while memory for it is left.
    """

    load_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0
    keeps_spare: bool = False


class ModelRouter:
    """Owner of all children.

    Args:
        start: starts a model's server.
        measure: returns a model's memory; called in a thread.
        flags: returns the flags of a model's server.
        available_bytes: returns the memory that the machine can still give.
    """

    def __init__(
        self,
        models: Models,
        planner: RouterPlanner,
        *,
        start: Starter,
        measure: Callable[[ModelEntry], Estimate],
        flags: Flags,
        available_bytes: Callable[[], int],
        metrics: RouterMetrics,
        settings: RouterSettings | None = None,
    ) -> None:
        self.models = models
        self.planner = planner
        self._start = start
        self._measure_entry = measure
        self._flags = flags
        self._available_bytes = available_bytes
        self._metrics = metrics
        self._settings = settings or RouterSettings()
        self._children: dict[str, Child] = {}
        self._causes: dict[str, str] = {}  # Reasons for ends that the router itself brought about.
        self._estimates: dict[str, Estimate] = {}
        self._futures: dict[int, asyncio.Future[Child]] = {}
        self._numbers = count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._measuring: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._subscribers: set[asyncio.Queue[tuple[str, ModelPhase]]] = set()
        self._shown: dict[str, ModelPhase] = {}
        metrics.watch(planner)

    # For requests

    @asynccontextmanager
    async def using(
        self, model: str, *, keep_alive_s: float | None = None, autoload: bool = True
    ) -> AsyncIterator[Child]:
        """Wait until a model is in memory, and keep it there until the end of the block.

        Raises:
            UnavailableError: it was not available in time, failed, or too many requests wait.
            RateLimitError: it has as many requests as it may have.
        """
        number, began = next(self._numbers), time.monotonic()
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            child = await self._admitted(number, model, future, autoload=autoload)
            self._metrics.admitted(model, time.monotonic() - began)
            yield child
        finally:
            del self._futures[number]
            if not future.cancel() and not future.cancelled():
                future.exception()  # seen, even if the client left at the same time
            self.planner.leave(number, model, time.monotonic(), keep_alive_s)
            self.step()

    async def _admitted(
        self, number: int, model: str, future: asyncio.Future[Child], *, autoload: bool
    ) -> Child:
        try:
            self.planner.request(number, model, time.monotonic(), autoload=autoload)
            self.step()
            return await future
        except QuireError as error:
            self._metrics.refused(model, error.status)
            raise

    def child_of(self, model: str) -> Child | None:
        """Return a model's server if it serves; it may end at any time."""
        return self._children.get(model) if self.state(model).status is ModelPhase.LOADED else None

    def load(self, model: str) -> None:
        """Load a model without a request."""
        self.planner.want(model, time.monotonic())
        self.step()

    def unload(self, model: str) -> None:
        """Unload a model as soon as no request uses it.

        Raises:
            ConflictError: it is pinned.
        """
        if self.models.entries[model].pinned:
            raise ConflictError(f"the model {model!r} is pinned, so it is never unloaded")
        self.planner.release(model)
        self.step()

    def reload(self, models: Models) -> None:
        """Use these models from now on; servers whose flags change are started anew when they are idle."""
        before, self.models = self.models, models
        renewed = {
            name for name, one in models.entries.items() if _needs_restart(before.entries.get(name), one)
        }
        self.planner.change({name: rules_of(one) for name, one in models.entries.items()}, renewed)
        self._load_first(renewed)

    def state(self, model: str) -> ModelState:
        """Return a model's state; raises NotFoundError if the model was removed."""
        return self.planner.state_of(model)

    def estimate_of(self, model: str) -> Estimate | None:
        """Return a model's estimated memory; None until it was measured."""
        return self._estimates.get(model)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[asyncio.Queue[tuple[str, ModelPhase]]]:
        """Subscribe to changes of state; one that is too slow misses some."""
        events: asyncio.Queue[tuple[str, ModelPhase]] = asyncio.Queue(MAX_EVENTS)
        self._subscribers.add(events)
        try:
            yield events
        finally:
            self._subscribers.discard(events)

    # Lifecycle

    def open(self) -> None:
        """Load the models that are pinned or preloaded."""
        self._load_first(self.models.entries)

    def _load_first(self, new: Collection[str]) -> None:
        """Load the models that are pinned, and those of the new ones that are preloaded."""
        for name, entry in self.models.entries.items():
            if entry.pinned or (entry.preload and name in new):
                self.planner.want(name, time.monotonic())
        self.step()

    def drain(self) -> None:
        """Refuse what waits and what comes; what runs goes on."""
        self.planner.drain()
        self.step()

    def cancel_requests(self) -> None:
        """Let all children end their requests with an error."""
        for child in self._children.values():
            child.terminate()
            child.terminate(at_once=True)

    async def close(self) -> None:
        """End all children."""
        self.planner.drain()
        for task in self._measuring:
            task.cancel()
        while self._tasks:  # one that loads may have no process yet
            await asyncio.gather(*map(self._stop, self._children.values()))
            await asyncio.sleep(0 if self._children else POLL_S)
        await self._start.close()
        if self._timer is not None:
            self._timer.cancel()

    # Planning

    def step(self) -> None:
        """Execute what the planner decides now, and set the time of the next decision."""
        while actions := self.planner.plan(time.monotonic(), self._left_bytes()):
            for action in actions:
                self._execute(action)
        self._keep_spare()
        self._publish()
        self.planner.purge()
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic()
        after_s = self.planner.next_event(now) - now
        loop = asyncio.get_running_loop()
        self._timer = None if math.isinf(after_s) else loop.call_later(after_s, self.step)

    def _left_bytes(self) -> int:
        """Return the memory that models can still get; that of the spare process is theirs."""
        return self._available_bytes() + (PROCESS_BYTES if self._start.has_spare else 0)

    def _keep_spare(self) -> None:
        """Keep a spare process if a model may need it and memory for it is left; start it while no model loads."""
        planner = self.planner
        if not self._settings.keeps_spare or self._is_starting:
            return  # a load that has no process yet takes the spare one
        states = planner.models.values()
        room = planner.limits.memory_bytes - planner.charged_bytes
        is_of_use = not planner.is_draining and any(not state.has_processes for state in states)
        fits = room >= PROCESS_BYTES and self._left_bytes() >= PROCESS_BYTES
        if not (is_of_use and fits):
            self._start.keep_spare(False)
        elif not any(state.status in CHANGING for state in states):
            self._start.keep_spare(True)

    @property
    def _is_starting(self) -> bool:
        """True if a model is to be loaded, and no process was started for it."""
        states = self.planner.models.values()
        return any(
            state.status is ModelPhase.LOADING and state.name not in self._children for state in states
        )

    def _execute(self, action: Action) -> None:
        if isinstance(action, Admit):
            self._admit(action)
        elif isinstance(action, Refuse):
            future = self._futures[action.request]
            if not future.done():
                future.set_exception(action.error)
        else:
            task = self._run(self._WORK[type(action)](self, action.model))
            if isinstance(action, Measure):
                self._measuring.add(task)
                task.add_done_callback(self._measuring.discard)

    def _admit(self, action: Admit) -> None:
        future, child = self._futures[action.request], self._children.get(action.model)
        assert child is not None, "a loaded model has a server until its end is reported"
        if not future.done():
            future.set_result(child)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.critical("the router has met an unexpected error", exc_info=task.exception())

    def _publish(self) -> None:
        """Send changed states to the log and to subscribers."""
        for name, state in self.planner.models.items():
            if state.status is self._shown.get(name, ModelPhase.UNLOADED):
                continue
            self._shown[name] = state.status
            logger.info("model %s: %s", name, state.status)
            for events in self._subscribers:
                if not events.full():
                    events.put_nowait((name, state.status))

    # Actions

    async def _measure(self, model: str) -> None:
        """Estimate a model's memory, in a thread that a download may hold up, even beyond the router's end."""
        entry = self.models.entries.get(model)
        if entry is None:
            return  # it was removed meanwhile
        try:
            found: Estimate | QuireError | OSError = await _in_thread(partial(self._measure_entry, entry))
        except (QuireError, OSError) as error:
            found = error
        if self.models.entries.get(model) != entry:
            return  # it was changed meanwhile
        if not isinstance(found, Estimate):
            logger.error("model %s: its memory cannot be estimated: %s", model, found)
            self._fail(model, "its files cannot be read; the server's log has the reason")
            return
        self._estimates[model] = found
        logger.info(
            "model %s: %.0f MiB: weights %.0f, KV cache %.0f, a step's tensors %.0f, and the processes",
            model,
            found.size.needed_bytes / MIB,
            found.weight_bytes / MIB,
            found.kv_cache_bytes / MIB,
            found.step_bytes / MIB,
        )
        self.planner.sized(model, found.size)
        too_large = self.planner.too_large(self.planner.models[model])
        if too_large is not None:
            logger.error("%s", too_large)  # no request may ask for a pinned model for a long time
        self.step()

    async def _load(self, model: str) -> None:
        entry, began = self.models.entries.get(model), time.monotonic()
        await self._start.settle()
        if entry is None:  # it was removed meanwhile
            self.planner.ended(model, time.monotonic())
            self.step()
            return
        try:
            child = await self._start(model, self._flags(entry, self._estimates[model]))
        except OSError as error:
            self._fail(model, f"its process cannot be started: {error.strerror}")
            return
        self._children[model] = child
        self._run(self._watch(model, child))
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                await child.wait_ready()
        except TimeoutError:
            self._kill(model, child, f"it did not load within {self._settings.load_timeout_s:g} s")
        except ChildLostError:
            pass  # its watcher reports the end
        else:
            logger.info("model %s: loaded in %.2f s", model, time.monotonic() - began)
            self._metrics.loaded(model)
            self._become_ready(model, child)

    async def _unload(self, model: str) -> None:
        self._metrics.evicted(model, "unload")
        await self._stop(self._children[model])

    async def _suspend(self, model: str) -> None:
        child = self._children[model]
        try:
            slept = await child.control("/sleep?level=1&mode=wait")
        except ChildLostError:
            return  # its watcher reports the end
        if self._children.get(model) is not child:
            return
        if slept:
            self._metrics.evicted(model, "sleep")
            self.planner.asleep(model, time.monotonic())
        else:
            logger.warning("model %s cannot sleep; from now on it is unloaded instead", model)
            self.planner.cannot_sleep(model, time.monotonic())
        self.step()

    async def _wake(self, model: str) -> None:
        child = self._children[model]
        await self._start.settle()
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                woke = await child.control("/wake_up")
        except ChildLostError:
            return  # its watcher reports the end
        except TimeoutError:
            woke = False
        if woke:
            self._become_ready(model, child)
        else:
            self._kill(model, child, "it did not wake")

    _WORK: Mapping[type[Action], Callable[[ModelRouter, str], Coroutine[Any, Any, None]]] = {
        Measure: _measure,
        LoadModel: _load,
        Unload: _unload,
        Suspend: _suspend,
        Wake: _wake,
    }

    def _become_ready(self, model: str, child: Child) -> None:
        if self._children.get(model) is child:  # otherwise its end was reported meanwhile
            self.planner.ready(model, time.monotonic())
            self.step()

    async def _stop(self, child: Child) -> None:
        """End a child: ask, then insist, then kill."""
        ended = asyncio.ensure_future(child.ended())
        child.terminate()
        await asyncio.wait({ended}, timeout=self._settings.stop_timeout_s)
        if not ended.done():
            child.terminate(at_once=True)
            await asyncio.wait({ended}, timeout=STOP_GRACE_S)
        if not ended.done():
            child.kill()
        await ended

    def _kill(self, model: str, child: Child, cause: str) -> None:
        self._causes[model] = cause
        child.kill()

    async def _watch(self, model: str, child: Child) -> None:
        """Report the end of a child, when its memory is back."""
        reason = await child.ended()
        reason = self._causes.pop(model, reason)
        del self._children[model]
        if self.planner.models[model].status is ModelPhase.UNLOADING or self.planner.is_draining:
            self.planner.ended(model, time.monotonic())
            self.step()
        else:
            logger.error("model %s: its server has ended: %s", model, reason)
            self._fail(model, reason)

    def _fail(self, model: str, reason: str) -> None:
        self._metrics.failed(model)
        self.planner.failed(model, reason, time.monotonic())
        self.step()


def rules_of(entry: ModelEntry) -> ModelRules:
    """Return the planner's rules of a model."""
    return ModelRules(entry.pinned, entry.keep_alive_s, entry.sleep, entry.max_requests)


def _needs_restart(before: ModelEntry | None, after: ModelEntry) -> bool:
    """Return whether an entry differs from an earlier one in more than the planner's rules."""
    return before is None or after != replace(
        before,
        pinned=after.pinned,
        preload=after.preload,
        keep_alive_s=after.keep_alive_s,
        sleep=after.sleep,
        max_requests=after.max_requests,
    )


async def _in_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns in a thread that does not delay the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if future.done():
            return  # cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, Exception | None] = work(), None
        except Exception as error:  # raised where it is awaited
            outcome = None, error
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=run, name="quire-measure", daemon=True).start()
    return await future
