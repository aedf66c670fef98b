# SPDX-License-Identifier: Apache-2.0
"""The core's side of a store: which blocks are loaded and saved, and when.

A new request is held while blocks that extend its cached prefix are loaded into the host tier, from which it then takes
them like any other hit. Blocks that a step has completed are copied to the host tier by the next plan and saved from
there. A preempted request is held in the same way before it is resumed. So the planner knows nothing of a store.

Invariants: a held request is released within a bounded time, whatever the store does. A load that failed, in whole or
in part, is a shorter hit. Nothing here waits for the store but `settle`, which does so for a bounded time and lets go
of no block that the store may still write to or read.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.step_loop import Clock
from quire.executor.base import Executor
from quire.kv_cache.events import DISK
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.rows import RowResult
from quire.kv_store.jobs import RowJobs, RowsJob, can_go_on
from quire.scheduler.explain import Cause
from quire.scheduler.feature_stats import StoreStats
from quire.scheduler.holds import Hold
from quire.scheduler.output import RequestUpdate, SchedulerStats
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

DETAILS = {DISK: "its prefix from disk"}
OTHER_DETAIL = "its prefix from the row server"
POLL_S = 0.001
MOST_WAIT_S = 10.0
"""Longest hold of a request."""
LEAST_WAIT_S = 0.25
REST_S = 1.0
"""Time for which a store that did not work or was slow is left alone; doubles up to `MOST_REST_S`."""
MOST_REST_S = 60.0
SETTLE_S = 5.0
EXPECTED_BYTES_PER_S = 3e8
"""Rate of loads before one was measured."""
REGAINED = 1.02
"""Factor of the rate for each prefix that was faster to compute by it."""
MOST_SAVES = 2
"""Batches that are being saved at once."""
BATCH_ROWS = 128
MOST_QUEUED = 100_000
MOST_REMEMBERED = 10_000
MEASURED_BYTES = 2**20
"""Fewest bytes of a load that tell a rate."""


@dataclass(eq=False)
class Waiting:
    """Held request, until its lookup and then its `jobs` have ended, or until `until`."""

    request_id: str
    hold: str
    keys: list[BlockHash]
    lookup: Future[RowResult] | None
    until: float
    jobs: set[RowsJob] = field(default_factory=set)
    is_resumed: bool = False


class StoreTier(CoreFeature):
    """Loads and saves of one core."""

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        self._info = executor.open_row_store()
        self._watch = scheduler.watch_cache()
        self._stats = StoreStats(medium=self._info.medium, num_rows=self._info.num_rows)
        self._bytes_per_s = EXPECTED_BYTES_PER_S
        self._waiting: list[Waiting] = []
        self._jobs = RowJobs(executor, scheduler, clock)
        self._to_save: OrderedDict[BlockHash, None] = OrderedDict()
        self._unsaved: tuple[list[BlockHash], Future[RowResult]] | None = (
            None  # being looked up before a save
        )
        self._ranges: OrderedDict[str, tuple[int, int]] = OrderedDict()  # request -> tokens loaded for it
        self._tried: OrderedDict[str, int] = OrderedDict()  # preempted request -> its preemptions
        self._num_holds = 0
        self._detail = DETAILS.get(self._info.medium, OTHER_DETAIL)
        self._announces = config.kv_events.enabled and not config.kv_store.is_peer
        self._listing = executor.move_rows("list", []) if self._announces else None
        self._removals: list[Future[RowResult]] = []  # of content that proved wrong
        self._rest_s = REST_S
        self._rest_until = 0.0

    @staticmethod
    def is_wanted(config: EngineConfig) -> bool:
        return config.kv_store.kv_store is not None

    @property
    def has_work(self) -> bool:
        now = self._clock()
        return (
            any(one.until <= now or can_go_on(one.lookup, one.jobs) for one in self._waiting)
            or self._jobs.has_work
            or (self._unsaved is not None and self._unsaved[1].done())
            or (self._listing is not None and self._listing.done())
            or self._can_save
        )

    @property
    def patience_s(self) -> float | None:
        is_busy = self._waiting or self._jobs or self._unsaved or self._listing
        return POLL_S if is_busy else None

    def admitted(self, request_id: str) -> None:
        """Look for the prefix of a new request in the store, and hold it if blocks of it are there."""
        keys = [] if self._is_resting else self._scheduler.storable_keys(request_id)
        if not keys:
            return
        if self._info.is_writable:
            self._executor.move_rows("touch", [(key, 0) for key in keys])
        self._look_up(request_id, keys, is_resumed=False)

    def _look_up(self, request_id: str, keys: list[BlockHash], *, is_resumed: bool) -> None:
        """Hold a waiting request while blocks of it that are not cached are looked for in the store, and loaded."""
        if all(map(self._scheduler.is_cached, keys)):
            return
        self._num_holds += 1
        lookup = self._executor.move_rows("find", [(key, 0) for key in keys])
        hold, until = f"stored prefix {self._num_holds}", self._clock() + LEAST_WAIT_S
        waiting = Waiting(request_id, hold, keys, lookup, until, is_resumed=is_resumed)
        if self._is_held(waiting):
            self._scheduler.hold(request_id, Hold(waiting.hold, Cause.NOT_READY, self._detail), self._clock())
            self._waiting.append(waiting)
            self._jobs.start_due()

    def advance(self) -> list[RequestUpdate]:
        self._end_jobs()
        self._jobs.start_due()
        self._release_ready()
        self._reload_preempted()
        self._plan_saves()
        return []

    def stepped(self, updates: list[RequestUpdate]) -> None:
        changes = self._watch.pop()
        if changes.forgotten:
            self._forget(changes.forgotten)
        if self._info.is_writable:
            self._to_save.update(dict.fromkeys(changes.cached))
            while len(self._to_save) > MOST_QUEUED:
                self._to_save.popitem(last=False)
        for update in updates:
            self._add_range(update)
        self._end_jobs()
        self._jobs.start_due()
        self._plan_saves()

    def add_stats(self, stats: SchedulerStats) -> None:
        self._stats.is_resting = self._is_resting
        stats.store = msgspec.structs.replace(self._stats)

    def settle(self, run_step: Callable[[], object]) -> None:
        """Save what is queued, for `SETTLE_S` at most, and end all transfers."""
        until = self._clock() + SETTLE_S
        while self._clock() < until and (self._jobs or self._unsaved or self._can_save):
            self._settle_part(run_step)
        self._stats.num_unsaved += len(self._to_save)
        self._to_save.clear()
        until = self._clock() + SETTLE_S
        while self._jobs and self._clock() < until:
            self._settle_part(run_step)

    def _settle_part(self, run_step: Callable[[], object]) -> None:
        """Take one part of the way to having no job."""
        self._jobs.wait(run_step, lambda: time.sleep(POLL_S))
        self.advance()

    # Loads

    def _is_held(self, waiting: Waiting) -> bool:
        """Take a waiting request as far as it gets; False if nothing is left to wait for."""
        if waiting.lookup is not None and waiting.lookup.done():
            found, waiting.lookup = waiting.lookup.result(), None
            self._begin_load(waiting, found)
        return waiting.lookup is not None or bool(waiting.jobs)

    def _begin_load(self, waiting: Waiting, found: RowResult) -> None:
        """Begin to load what the store has of a request's prefix, if that is faster than computing it."""
        self._note_health(found)
        stored = [key for key, is_there in zip(waiting.keys, found.done, strict=True) if is_there]
        stored = [key for key in stored if self._jobs.is_right(key)]
        self._announce(stored, found.removed)
        computing_s = self._scheduler.computing_s(len(stored))
        if len(stored) * self._info.row_bytes / self._bytes_per_s > computing_s:
            self._bytes_per_s *= (
                REGAINED  # or a slow minute would end all loads for good: only loads are measured
            )
            return
        load = self._scheduler.begin_load(waiting.request_id, stored) if stored else None
        if load is None or load.end == load.start:
            return
        shared = set(load.shared)
        waiting.jobs = {job for job in self._jobs if job.action == "load" and not shared.isdisjoint(job.keys)}
        if load.transfers:
            job = RowsJob("load", load.transfers, self._scheduler.num_steps)
            self._jobs.add(job)
            waiting.jobs.add(job)
        waiting.until = self._clock() + min(max(computing_s, LEAST_WAIT_S), MOST_WAIT_S)
        if waiting.is_resumed:
            self._stats.num_reloads += 1
            return
        self._ranges[waiting.request_id] = (load.start, load.end)
        if len(self._ranges) > MOST_REMEMBERED:
            self._ranges.popitem(last=False)

    def _reload_preempted(self) -> None:
        """Before the next preempted request is resumed, load what the caches have lost of it meanwhile; tried once."""
        found = None if self._is_resting else self._scheduler.next_resumed()
        if found is None or self._tried.get(found[0]) == found[1]:
            return
        self._tried[found[0]] = found[1]
        self._tried.move_to_end(found[0])
        if len(self._tried) > MOST_REMEMBERED:
            self._tried.popitem(last=False)
        self._look_up(found[0], self._scheduler.storable_keys(found[0]), is_resumed=True)

    def _release_ready(self) -> None:
        """Release requests whose blocks are here, or which have waited long enough."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not self._is_held(one):
                self._scheduler.release(one.hold, self._clock())
            elif one.until <= self._clock():
                self._stats.num_timeouts += 1
                self._rest("it took too long")
                self._scheduler.release(one.hold, self._clock())
            else:
                self._waiting.append(one)

    def _add_range(self, update: RequestUpdate) -> None:
        """Say in a request's first and last update how many of its cached tokens came from the store."""
        start, end = self._ranges.get(update.request_id, (0, 0))
        update.num_stored_tokens = max(min(end, update.num_cached_tokens) - start, 0)
        if update.finish_reason is not None and self._ranges.pop(update.request_id, None) is not None:
            self._stats.num_hit_tokens += update.num_stored_tokens

    # Saves

    @property
    def _can_save(self) -> bool:
        num_saves = sum(job.action == "save" for job in self._jobs)
        is_free = self._unsaved is None and num_saves < MOST_SAVES and self._num_savable > 0
        return bool(self._to_save) and is_free and not self._is_resting

    @property
    def _num_savable(self) -> int:
        """Rows to save at once: half of the free host blocks are left to loads."""
        return min(BATCH_ROWS, self._scheduler.num_free_host_blocks // 2)

    def _plan_saves(self) -> None:
        """Have the next plan copy blocks to the host that the store lacks."""
        if self._unsaved is not None and self._unsaved[1].done():
            (keys, lookup), self._unsaved = self._unsaved, None
            self._begin_save(keys, lookup.result())
        if self._can_save:
            keys = [
                self._to_save.popitem(last=False)[0]
                for _ in range(min(self._num_savable, len(self._to_save)))
            ]
            lookup = self._executor.move_rows("find", [(key, 0) for key in keys])
            if lookup.done():
                self._begin_save(keys, lookup.result())
            else:
                self._unsaved = keys, lookup

    def _begin_save(self, keys: Sequence[BlockHash], found: RowResult) -> None:
        self._note_health(found)
        self._announce(itertools.compress(keys, found.done), found.removed)
        new = [key for key, is_there in zip(keys, found.done, strict=True) if not is_there]
        transfers = (
            self._scheduler.begin_saves([key for key in new if self._jobs.is_right(key)]) if new else []
        )
        self._stats.num_unsaved += len(new) - len(transfers)
        if transfers:
            self._jobs.add(RowsJob("save", transfers, self._scheduler.num_steps + 1))

    def _forget(self, keys: list[BlockHash]) -> None:
        """Remove content that proved wrong, also where it is on its way."""
        for key in keys:
            self._to_save.pop(key, None)
        self._jobs.forget(keys)
        self._removals.append(self._executor.move_rows("remove", [(key, 0) for key in keys]))
        self._announce([], keys)

    def _announce(self, stored: Iterable[BlockHash], removed: Sequence[bytes]) -> None:
        """Report to subscribers of KV events rows that the directory has lost, and rows that it has."""
        if self._announces:
            right = [key for key in stored if self._jobs.is_right(key)]
            self._scheduler.note_outside(right, removed, self._info.medium)

    def use_new_weights(self) -> None:
        """Go on with the store's rows of the new weights, which the worker has opened."""
        self._info = self._executor.open_row_store()
        self._scheduler.forget_outside()
        self._to_save.clear()
        if self._announces:
            self._listing = self._executor.move_rows("list", [])

    # Jobs

    def _end_jobs(self) -> None:
        """Note the jobs that have ended, and let their requests go on."""
        if self._listing is not None and self._listing.done():  # before what was begun later
            listed, self._listing = self._listing.result(), None
            self._announce(listed.names, listed.removed)
        for ended in self._jobs.pop_ended():
            self._note_health(ended.result)
            saved = itertools.compress(ended.job.keys, ended.moved) if ended.job.action == "save" else ()
            self._announce(saved, ended.result.removed)
            self._note_moved(ended.job, sum(ended.moved))
            for waiting in self._waiting:
                waiting.jobs.discard(ended.job)
        self._removals = [removal for removal in self._removals if not removal.done()]
        if self._unsaved is None and not self._removals:
            self._jobs.forgive()

    def _note_moved(self, job: RowsJob, num_rows: int) -> None:
        if job.action == "save":
            self._stats.num_saved += num_rows
            self._stats.num_unsaved += len(job.transfers) - num_rows
            return
        self._stats.num_loaded += num_rows
        self._stats.num_failed_loads += len(job.transfers) - num_rows
        num_bytes, elapsed = num_rows * self._info.row_bytes, self._clock() - job.started_at
        if num_bytes >= MEASURED_BYTES and elapsed > 0:
            self._bytes_per_s += (num_bytes / elapsed - self._bytes_per_s) / 4

    # Health

    @property
    def _is_resting(self) -> bool:
        return self._clock() < self._rest_until

    def _note_health(self, result: RowResult) -> None:
        """Note whether the store works, and its state."""
        mine, state = self._stats, result.stats
        if state is not None:
            mine.num_rows, mine.num_bytes = state.num_rows, state.num_bytes
            mine.num_corrupt, mine.num_evicted = state.num_corrupt, state.num_evicted
        if result.failure is None:
            self._rest_s = REST_S
        else:
            self._rest(result.failure)

    def _rest(self, reason: str) -> None:
        """Leave the store alone for a while."""
        if not self._is_resting:
            logger.warning("the KV cache store is not used for %g s: %s", self._rest_s, reason)
            self._rest_until = self._clock() + self._rest_s
            self._rest_s = min(2 * self._rest_s, MOST_REST_S)
            self._stats.num_rests += 1
