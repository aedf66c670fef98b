# SPDX-License-Identifier: Apache-2.0
"""Decisions of the router: which models are in memory, which requests go to them, wait or are refused.

Invariant: pure. Events, the time and the free memory come in, actions go out; no clock, I/O or randomness. The caller
executes every action and reports its outcome.

- A model that a request uses, one that loads and a pinned one are never unloaded or put to sleep.
- The memory charged to models never exceeds the limit. A model's charge begins with its load and ends when all of its
  processes have ended.
- Requests for models that are not in memory are served in the order of each model's oldest request. While that model
  waits for memory, no other one is loaded.
- A model in use keeps its place for `turn_s` seconds; then it takes no further requests, finishes those it has, and
  makes room for the model that waits. It serves those that waited for its load first.
- Every request is admitted once or refused once, at its deadline at the latest, unless its client leaves.
- A model whose entry has changed takes no further requests, ends those that it has, and is loaded anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from quire.errors import NotFoundError, QuireError, RateLimitError, UnavailableError

MIB = 2**20
FIRST_BACKOFF_S = 2.0
MAX_BACKOFF_S = 120.0
STABLE_S = 60.0  # Seconds in memory after which earlier failures of a model are forgotten.
POLL_S = 0.5  # Interval of looking for memory that other programs may give back.
MAX_RETRY_AFTER_S = 60


class ModelPhase(StrEnum):
    """State of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SUSPENDING = "suspending"
    SLEEPING = "sleeping"
    WAKING = "waking"
    UNLOADING = "unloading"
    FAILED = "failed"


CHANGING = {ModelPhase.LOADING, ModelPhase.SUSPENDING, ModelPhase.WAKING, ModelPhase.UNLOADING}


@dataclass(frozen=True)
class ModelRules:
    """Rules of one model.

    Attributes:
        keep_alive_s: idle seconds until it is unloaded; infinite: never.
        sleeps: whether it may sleep to make room, before it is unloaded.
        max_requests: most requests in progress and waiting; None: no limit.
    """

    pinned: bool = False
    keep_alive_s: float = math.inf
    sleeps: bool = True
    max_requests: int | None = None


@dataclass(frozen=True)
class PlannerLimits:
    """Limits of all models together; `max_loaded` 0: no limit."""

    memory_bytes: int
    max_loaded: int = 0
    wait_timeout_s: float = 300.0
    turn_s: float = 10.0
    max_waiting: int = 512


@dataclass(frozen=True)
class Size:
    """Memory of one model in bytes: while it serves, and while it sleeps."""

    needed_bytes: int
    asleep_bytes: int


@dataclass(frozen=True)
class Measure:
    """Determine a model's size, and call `sized`, or `failed`."""

    model: str


@dataclass(frozen=True)
class LoadModel:
    """Load a model, and call `ready`, or `failed` when its processes have ended."""

    model: str


@dataclass(frozen=True)
class Unload:
    """End a model's processes, and call `ended`."""

    model: str


@dataclass(frozen=True)
class Suspend:
    """Put a model to sleep, and call `asleep`."""

    model: str


@dataclass(frozen=True)
class Wake:
    """Wake a model, and call `ready`."""

    model: str


@dataclass(frozen=True)
class Admit:
    """Send a waiting request to its model, and call `leave` at its end."""

    request: int
    model: str


@dataclass(frozen=True)
class Refuse:
    """Answer a waiting request with an error."""

    request: int
    model: str
    error: QuireError


Action = Measure | LoadModel | Unload | Suspend | Wake | Admit | Refuse


@dataclass(eq=False)
class ModelState:
    """State of one model, changed by the planner only.

    Attributes:
        size: None until measured.
        waiting: request -> arrival time, in the order of arrival.
        running: requests that were admitted and have not ended.
        since: time of the last change of `status`.
        last_used: time at which the last request ended, or the model became ready.
        keep_alive_s: idle seconds until it is unloaded; set by its rules and by requests.
        wanted_since: time at which a load without a request was asked for.
        is_fresh: whether no request was admitted since it became ready.
        num_failures: deaths and failed loads since it was last stable.
        error: reason of the last failure.
        retry_at: time from which it may be loaded again.
        is_small: whether it sleeps, or ends in its sleep.
        is_stale: whether its processes were started by an entry that has changed since.
        is_removed: whether it has no entry any more; it is forgotten when nothing of it is left.
    """

    name: str
    rules: ModelRules
    status: ModelPhase = ModelPhase.UNLOADED
    size: Size | None = None
    is_measuring: bool = False
    waiting: dict[int, float] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    since: float = 0.0
    last_used: float = 0.0
    keep_alive_s: float = math.inf
    wanted_since: float | None = None
    is_fresh: bool = False
    num_failures: int = 0
    error: str = ""
    retry_at: float = 0.0
    is_small: bool = False
    is_stale: bool = False
    is_removed: bool = False

    @property
    def charged_bytes(self) -> int:
        """Bytes of memory that count as taken by this model."""
        if self.size is None or self.status in (ModelPhase.UNLOADED, ModelPhase.FAILED):
            return 0
        return self.size.asleep_bytes if self.is_small else self.size.needed_bytes

    @property
    def has_processes(self) -> bool:
        return self.status not in (ModelPhase.UNLOADED, ModelPhase.FAILED)

    @property
    def is_idle(self) -> bool:
        """True if it is in memory, and no request uses it."""
        return self.status in (ModelPhase.LOADED, ModelPhase.SLEEPING) and not self.running

    @property
    def expires_at(self) -> float:
        """Time at which it is unloaded if no request comes; infinite: never."""
        return math.inf if self.rules.pinned else self.last_used + self.keep_alive_s

    @property
    def first_wanted(self) -> float:
        """Arrival time of the oldest request; infinite if the model is not wanted."""
        arrivals = [next(iter(self.waiting.values()))] if self.waiting else []
        return min([*arrivals, *([] if self.wanted_since is None else [self.wanted_since])], default=math.inf)


class RouterPlanner:
    """Owner of all states; see the module's invariants.

    Args:
        models: name -> rules.
    """

    def __init__(self, models: Mapping[str, ModelRules], limits: PlannerLimits) -> None:
        self.limits = limits
        self.models = {
            name: ModelState(name, rules, keep_alive_s=rules.keep_alive_s) for name, rules in models.items()
        }
        self._closed: set[str] = set()
        self.is_draining = False

    def state_of(self, model: str) -> ModelState:
        """Return a model's state; raises NotFoundError if the model was removed."""
        state = self.models.get(model)
        if state is None or state.is_removed:
            raise _removed(model)
        return state

    # Events

    def request(self, request: int, model: str, now: float, *, autoload: bool = True) -> None:
        """Queue a request; a later `plan` admits or refuses it.

        Raises:
            NotFoundError: the model was removed.
            UnavailableError: too many requests wait, the model is not loaded and may not be, or all is ending.
            RateLimitError: the model has as many requests as it may have.
        """
        state = self.state_of(model)
        num_waiting = sum(len(one.waiting) for one in self.models.values())
        if self.is_draining:
            raise UnavailableError("the server is shutting down", retry_after=5)
        limit = state.rules.max_requests
        if limit is not None and len(state.running) + len(state.waiting) >= limit:
            raise RateLimitError(
                f"{limit} requests for the model {model!r} are in progress or wait, which is its limit",
                retry_after=1,
            )
        if num_waiting >= self.limits.max_waiting:
            raise UnavailableError(
                f"{num_waiting} requests wait for models, which is the limit (--models-max-waiting)",
                retry_after=self.retry_after(model, now),
            )
        if not autoload and state.status in (ModelPhase.UNLOADED, ModelPhase.FAILED, ModelPhase.UNLOADING):
            raise UnavailableError(
                f"the model {model!r} is {state.status}, and this request may not load it; POST /models/load does"
            )
        state.waiting[request] = now
        state.keep_alive_s = state.rules.keep_alive_s  # as if `release` had not been called

    def leave(self, request: int, model: str, now: float, keep_alive_s: float | None = None) -> None:
        """Remove a request that has ended, or whose client left while it waited; idempotent.

        Args:
            keep_alive_s: idle seconds after which the model is unloaded from now on; None: as before.
        """
        state = self.models.get(model)
        if state is None:
            return  # its model was removed
        state.waiting.pop(request, None)
        if request in state.running:
            state.running.discard(request)
            state.last_used = now
            if keep_alive_s is not None:
                state.keep_alive_s = keep_alive_s

    def want(self, model: str, now: float) -> None:
        """Ask for a load without a request."""
        state = self.models[model]
        is_there = state.status is ModelPhase.LOADED and not state.is_stale
        if not is_there and state.wanted_since is None:
            state.wanted_since = now
            state.retry_at = now

    def release(self, model: str) -> None:
        """Ask for an unload as soon as no request uses the model."""
        state = self.models[model]
        state.wanted_since = None
        state.keep_alive_s = 0.0

    def sized(self, model: str, size: Size) -> None:
        """Record a model's size."""
        state = self.models[model]
        state.size, state.is_measuring = size, False

    def ready(self, model: str, now: float) -> None:
        """Record that a model was loaded, or woke."""
        state = self.models[model]
        if state.wanted_since is not None:
            state.keep_alive_s = state.rules.keep_alive_s
        if not state.is_stale:
            state.wanted_since = None
        state.last_used, state.is_fresh = now, True
        self._set(state, ModelPhase.LOADED, now)

    def asleep(self, model: str, now: float) -> None:
        """Record that a model sleeps."""
        self._set(self.models[model], ModelPhase.SLEEPING, now)

    def cannot_sleep(self, model: str, now: float) -> None:
        """Record that a model serves on, because it cannot sleep."""
        state = self.models[model]
        state.rules = replace(state.rules, sleeps=False)
        self._set(state, ModelPhase.LOADED, now)

    def ended(self, model: str, now: float) -> None:
        """Record that the processes of an unloaded model have ended, and their memory is back."""
        self._set(self.models[model], ModelPhase.UNLOADED, now)

    def failed(self, model: str, error: str, now: float) -> None:
        """Record that a model could not be loaded, or died; its processes have ended.

        The first death of a model that served costs nothing but its requests: the next demand loads it again.
        """
        state = self.models[model]
        has_served = state.status in (ModelPhase.LOADED, ModelPhase.SUSPENDING, ModelPhase.SLEEPING)
        if has_served and now - state.since > STABLE_S:
            state.num_failures = 0
        state.num_failures += 1
        state.error, state.is_measuring, state.wanted_since = error, False, None
        if has_served and state.num_failures == 1:
            self._set(state, ModelPhase.UNLOADED, now)
            return
        state.retry_at = now + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (state.num_failures - 1))
        self._set(state, ModelPhase.FAILED, now)

    def drain(self) -> None:
        """Refuse all that wait, and all later requests; load nothing more."""
        self.is_draining = True

    def change(self, models: Mapping[str, ModelRules], renewed: Collection[str]) -> None:
        """Use other models and rules from now on.

        Args:
            renewed: models whose servers need other flags, or another size.
        """
        for name, rules in models.items():
            state = self.models.setdefault(name, ModelState(name, rules))
            state.rules, state.keep_alive_s, state.is_removed = rules, rules.keep_alive_s, False
        for name, state in self.models.items():
            if name not in models:
                state.is_removed, state.wanted_since = True, None
            if state.is_removed or name in renewed:
                _renew(state)

    def purge(self) -> None:
        """Forget removed models of which nothing is left."""
        for state in list(self.models.values()):
            if state.is_removed and not (state.has_processes or state.waiting or state.running):
                del self.models[state.name]

    # Decisions

    def plan(self, now: float, available_bytes: int) -> list[Action]:
        """Return the actions of this moment.

        Args:
            available_bytes: memory that the machine, or a control group, can still give.
        """
        actions = list(self._refusals(now))
        if self.is_draining:
            return actions
        room = _Room(self, available_bytes)
        self._closed = set()
        actions += self._expiries(now)
        actions += self._loads(now, room)
        actions += self._admissions()
        return actions

    def next_event(self, now: float) -> float:
        """Return the time at which `plan` has to be called again, if no event comes before; infinite: never."""
        times = [math.inf]
        for state in self.models.values():
            if state.waiting:
                times.append(next(iter(state.waiting.values())) + self.limits.wait_timeout_s)
                times.append(now + POLL_S)
            if state.wanted_since is not None:
                times.append(now + POLL_S)
            if state.is_idle:
                times.append(state.expires_at)
        return max(now, min(times))

    def retry_after(self, model: str, now: float) -> int:
        """Return seconds after which a refused client may try again, by what the model still waits for."""
        state = self.models[model]
        if state.status is ModelPhase.FAILED:
            return max(1, math.ceil(state.retry_at - now))
        ahead = sum(1 for other in self._wanted() if other.first_wanted < state.first_wanted)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil((ahead + 1) * max(1.0, self.limits.turn_s / 2))))

    def place_in_queue(self, model: str) -> int:
        """Return the number of models that are loaded before this one, plus one."""
        state = self.models[model]
        return 1 + sum(1 for other in self._wanted() if other.first_wanted < state.first_wanted)

    @property
    def charged_bytes(self) -> int:
        """Memory charged to all models, in bytes."""
        return sum(state.charged_bytes for state in self.models.values())

    def _set(self, state: ModelState, status: ModelPhase, now: float) -> None:
        ends_asleep = status is ModelPhase.UNLOADING and state.is_small
        state.status, state.since = status, now
        state.is_small = status is ModelPhase.SLEEPING or ends_asleep
        if state.is_stale and not state.has_processes:
            _renew(state)

    def _refusals(self, now: float) -> Iterator[Action]:
        """Refuse requests that waited too long, that cannot be served, or that come at the end."""
        for state in self.models.values():
            for request, arrival in list(state.waiting.items()):
                error = self._why_not(state, arrival, now)
                if error is not None:
                    del state.waiting[request]
                    yield Refuse(request, state.name, error)
            is_back = state.status is ModelPhase.FAILED and now >= state.retry_at
            if is_back and (state.waiting or state.wanted_since is not None):
                self._set(state, ModelPhase.UNLOADED, now)

    def _why_not(self, state: ModelState, arrival: float, now: float) -> QuireError | None:
        name, waited = state.name, now - arrival
        if self.is_draining:
            return UnavailableError("the server is shutting down", retry_after=5)
        if state.is_removed:
            return _removed(name)
        if state.status is ModelPhase.FAILED and now < state.retry_at:
            times = f"failed {state.num_failures} times" if state.num_failures > 1 else "failed"
            wait_s = max(1, math.ceil(state.retry_at - now))
            return UnavailableError(
                f"the model {name!r} {times}: {state.error}; it is tried again in {wait_s} s",
                retry_after=wait_s,
            )
        if waited < self.limits.wait_timeout_s:
            return self.too_large(state)
        place = self.place_in_queue(name)
        return UnavailableError(
            f"the model {name!r} is {state.status} and was not available within {waited:.0f} s "
            f"(--models-wait-timeout); it is number {place} of the models that wait for memory",
            retry_after=self.retry_after(name, now),
        )

    def too_large(self, state: ModelState) -> QuireError | None:
        """Return the error of a model that does not fit even if all but pinned ones were unloaded."""
        if state.size is None or state.has_processes:
            return None
        pinned = sum(
            one.size.needed_bytes
            for one in self.models.values()
            if one.rules.pinned and one is not state and one.size is not None
        )
        limit, needed = self.limits.memory_bytes, state.size.needed_bytes
        if needed + pinned <= limit:
            return None
        return UnavailableError(
            f"the model {state.name!r} needs {needed / MIB:.0f} MiB, and of {limit / MIB:.0f} MiB for models "
            f"{pinned / MIB:.0f} MiB belong to pinned ones",
            retry_after=MAX_RETRY_AFTER_S,
        )

    def _expiries(self, now: float) -> Iterator[Action]:
        """Unload idle models whose time is over, or whose entry has changed."""
        for state in self.models.values():
            is_over = not state.waiting and now >= state.expires_at
            if state.is_idle and (is_over or state.is_stale):
                self._set(state, ModelPhase.UNLOADING, now)
                yield Unload(state.name)

    def _admissions(self) -> Iterator[Action]:
        for state in self.models.values():
            is_open = state.name not in self._closed and not state.is_stale
            if state.status is ModelPhase.LOADED and is_open:
                for request in list(state.waiting):
                    del state.waiting[request]
                    state.running.add(request)
                    state.is_fresh = False
                    yield Admit(request, state.name)

    def _wanted(self) -> list[ModelState]:
        """Return the models that wait to be loaded or woken, the longest waiting one first."""
        wanted = [
            state
            for state in self.models.values()
            if state.first_wanted < math.inf and state.status not in (ModelPhase.LOADED, *CHANGING)
        ]
        return sorted(wanted, key=lambda state: state.first_wanted)

    def _loads(self, now: float, room: _Room) -> Iterator[Action]:
        """Load wanted models in order, or make room for the first one that does not fit."""
        for state in self._wanted():
            if state.size is None:
                if not state.is_measuring:
                    state.is_measuring = True
                    yield Measure(state.name)
                continue
            if state.status is ModelPhase.FAILED:
                continue
            if self.too_large(state) is not None:
                state.wanted_since, state.error = None, str(self.too_large(state))
                continue
            is_asleep = state.status is ModelPhase.SLEEPING
            more_bytes = state.size.needed_bytes - state.charged_bytes
            if not room.fits(more_bytes, 0 if is_asleep else 1):
                yield from self._make_room(state, more_bytes, 0 if is_asleep else 1, now, room)
                return
            room.take(more_bytes, 0 if is_asleep else 1)
            self._set(state, ModelPhase.WAKING if is_asleep else ModelPhase.LOADING, now)
            yield Wake(state.name) if is_asleep else LoadModel(state.name)

    def _make_room(
        self, wanted: ModelState, num_bytes: int, num_places: int, now: float, room: _Room
    ) -> Iterator[Action]:
        """Free memory for one model: let idle ones sleep, else unload them, else close some that are in use."""
        short_bytes, short_places = room.shortage(num_bytes, num_places)
        if short_bytes <= 0 and short_places <= 0:
            return  # enough comes back from models that are being unloaded
        idle = sorted(self._evictable(wanted, idle=True), key=lambda state: state.last_used)
        naps = [state for state in idle if state.rules.sleeps and state.status is ModelPhase.LOADED]
        chosen = _first_that_free(naps, short_bytes, _freed_by_sleep) if short_places <= 0 else None
        if chosen is not None:
            for state in chosen:
                self._set(state, ModelPhase.SUSPENDING, now)
                yield Suspend(state.name)
            return
        chosen = _first_that_free(idle, short_bytes, _freed_by_end, short_places)
        if chosen is None:
            chosen = self._with_closed(wanted, idle, short_bytes, short_places, now)
        for state in chosen:
            self._set(state, ModelPhase.UNLOADING, now)
            yield Unload(state.name)

    def _with_closed(
        self, wanted: ModelState, idle: list[ModelState], short_bytes: int, short_places: int, now: float
    ) -> list[ModelState]:
        """Close models in use, the longest loaded first, so that they and the idle ones make room.

        Returns the idle ones to unload at once; none unless all together suffice.
        """
        if now - wanted.first_wanted < self.limits.turn_s:
            return []
        busy = [
            state for state in self._evictable(wanted, idle=False) if now - state.since >= self.limits.turn_s
        ]
        busy.sort(key=lambda state: state.since)
        chosen = _first_that_free([*idle, *busy], short_bytes, _freed_by_end, short_places)
        if chosen is None:
            return []
        self._closed = {state.name for state in chosen if state.running}
        return [state for state in chosen if not state.running]

    def _evictable(self, wanted: ModelState, *, idle: bool) -> Iterator[ModelState]:
        """Yield the models in memory that may make room: those without requests, or those with requests."""
        for state in self.models.values():
            is_loaded = state.status in (ModelPhase.LOADED, ModelPhase.SLEEPING)
            if state is wanted or state.rules.pinned or not is_loaded:
                continue
            is_promised = state.is_fresh and state.status is ModelPhase.LOADED and bool(state.waiting)
            if idle == (not state.running and not state.waiting) and not is_promised:
                yield state


def _removed(model: str) -> NotFoundError:
    return NotFoundError(f"the model {model!r} was removed from the server's models", param="model")


def _renew(state: ModelState) -> None:
    """Let a model be measured and loaded anew, once its processes have ended, whatever failed before."""
    state.num_failures, state.error, state.retry_at, state.is_measuring = 0, "", 0.0, False
    state.is_stale = state.has_processes
    if not state.is_stale:
        state.status, state.size = ModelPhase.UNLOADED, None


class _Room:
    """Memory and places that are left while one plan is made."""

    def __init__(self, planner: RouterPlanner, available_bytes: int) -> None:
        states = planner.models.values()
        limit = planner.limits.max_loaded
        # What loading models will take is not missing yet, in whole or in part.
        coming = sum(map(_coming_bytes, states))
        self._free_bytes = min(planner.limits.memory_bytes - planner.charged_bytes, available_bytes - coming)
        self._free_places = (limit or len(states)) - sum(state.has_processes for state in states)
        ending = [state for state in states if state.status is ModelPhase.UNLOADING]
        self._returning_places = len(ending)
        self._returning_bytes = sum(map(_freed_by_end, ending)) + sum(
            _freed_by_sleep(state) for state in states if state.status is ModelPhase.SUSPENDING
        )

    def fits(self, num_bytes: int, num_places: int) -> bool:
        return num_bytes <= self._free_bytes and num_places <= self._free_places

    def take(self, num_bytes: int, num_places: int) -> None:
        self._free_bytes -= num_bytes
        self._free_places -= num_places

    def shortage(self, num_bytes: int, num_places: int) -> tuple[int, int]:
        """Return the bytes and places that are missing when all that is being freed is back."""
        return (
            num_bytes - self._free_bytes - self._returning_bytes,
            num_places - self._free_places - self._returning_places,
        )


def _coming_bytes(state: ModelState) -> int:
    if state.status is ModelPhase.LOADING:
        return state.charged_bytes
    return _freed_by_sleep(state) if state.status is ModelPhase.WAKING else 0


def _freed_by_end(state: ModelState) -> int:
    return state.charged_bytes


def _freed_by_sleep(state: ModelState) -> int:
    return 0 if state.size is None else state.size.needed_bytes - state.size.asleep_bytes


def _first_that_free(
    states: Sequence[ModelState], short_bytes: int, freed: Callable[[ModelState], int], short_places: int = 0
) -> list[ModelState] | None:
    """Return the first states that free enough, without those that are not needed; None: all free too little."""

    def suffice(some: Sequence[ModelState]) -> bool:
        return sum(map(freed, some)) >= short_bytes and len(some) >= short_places

    count = next((count for count in range(len(states) + 1) if suffice(states[:count])), None)
    if count is None:
        return None
    chosen = list(states[:count])
    for state in reversed(chosen[:-1]):
        rest = [one for one in chosen if one is not state]
        chosen = rest if suffice(rest) else chosen
    return chosen
