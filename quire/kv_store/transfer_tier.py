# SPDX-License-Identifier: Apache-2.0
"""The core's side of transfers between a prefill engine and a decode engine (`--kv-transfer-config`).

An engine that prefills copies the blocks of a request's prompt to the host tier as they are computed, and from there to
its connector, under a lease. The request's last update waits for the copies and carries the offer. An engine that
decodes holds a request while its blocks are pulled into the host tier, from which the request takes them like any hit.

Invariant: a held request is released, and a withheld update sent, within a bounded time, whatever the other engine
does. A pull that failed, in whole or in part, is a shorter hit, or ends the request (`kv_load_failure_policy`). Each
lease is ended once by whoever pulls, or ends by itself.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.messages import EngineCoreRequest
from quire.engine.step_loop import Clock
from quire.executor.base import Executor
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.rows import OFFERS, LeaseStats, RowResult
from quire.kv_store import tier
from quire.kv_store.jobs import RowJobs, RowsJob, can_go_on
from quire.kv_transfer_params import PULL_FAILED, KVOffer, KVTransfer
from quire.scheduler.explain import Cause
from quire.scheduler.feature_stats import TransferStats
from quire.scheduler.holds import Hold
from quire.scheduler.output import RequestUpdate, SchedulerStats
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

DETAIL = "its prompt's blocks from the prefill engine"
FAILED = f"{DETAIL}, of which not all came: the rest is computed,"
OFFER_S = 5.0
"""Longest delay of a request's last update for the copies of its blocks."""
REST_S = 1.0
"""Time for which an engine that did not answer is left alone; doubles up to `MOST_REST_S`."""
MOST_REST_S = 30.0
LEASES_S = 1.0
"""Time between two counts of the leases that are held."""


@dataclass(eq=False)
class Pull:
    """Held request, until its lookup and then its `jobs` have ended, or until `until`."""

    request_id: str
    hold: str
    keys: list[BlockHash]
    source: KVTransfer
    lookup: Future[RowResult] | None
    until: float
    renew_at: float
    jobs: set[RowsJob] = field(default_factory=set)
    is_short: bool = False


@dataclass(eq=False)
class Offer:
    """Request whose blocks are copied for another engine; with `last`, its withheld update, it has finished."""

    lease: str
    keys: list[BlockHash]
    todo: list[BlockHash]
    kept: set[BlockHash] = field(default_factory=set)
    jobs: set[RowsJob] = field(default_factory=set)
    last: RequestUpdate | None = None
    until: float = 0.0
    retry_at: float = 0.0


@dataclass
class _Health:
    """State of one other engine."""

    rest_s: float = REST_S
    rest_until: float = 0.0


class TransferTier(CoreFeature):
    """Offers and pulls of one core."""

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        settings = config.kv_store.transfer
        assert settings is not None, "only with --kv-transfer-config"
        self._extra = settings.extra
        self._fails = settings.kv_load_failure_policy == "fail"
        self._failed: list[str] = []  # requests to be ended
        self._info = executor.open_row_store()
        self._parallel = config.parallel
        self._engine_id = settings.engine_id or str(uuid.uuid4())
        self._watch = scheduler.watch_cache()
        self._jobs = RowJobs(executor, scheduler, clock)
        self._stats = TransferStats()
        self._arriving: tuple[str, KVTransfer] | None = None  # not admitted yet
        self._pulls: list[Pull] = []
        self._offers: dict[str, Offer] = {}
        self._ending: list[Offer] = []
        self._withdrawn: list[Offer] = []  # whose jobs have not ended
        self._ranges: OrderedDict[str, tuple[int, int]] = OrderedDict()  # request -> tokens loaded for it
        self._health: dict[str, _Health] = {}
        self._num_holds = 0
        self._count: Future[RowResult] | None = None  # of leases
        self._count_at = math.inf
        self._has_one_group = scheduler.tokens_of(1) == config.cache.block_size

    @staticmethod
    def is_wanted(config: EngineConfig) -> bool:
        return config.kv_store.transfer is not None

    @property
    def has_work(self) -> bool:
        now = self._clock()
        return (
            self._arriving is not None
            or self._jobs.has_work
            or any(pull.until <= now or can_go_on(pull.lookup, pull.jobs) for pull in self._pulls)
            or any(offer.until <= now or (offer.retry_at <= now and not offer.jobs) for offer in self._ending)
            or bool(self._failed)
            or self._count_at <= now
            or (self._count is not None and self._count.done())
        )

    @property
    def patience_s(self) -> float | None:
        if self._pulls or self._jobs or self._ending or self._count is not None:
            return tier.POLL_S
        return LEASES_S if self._count_at < math.inf else None

    def holds_for(self, message: EngineCoreRequest) -> list[Hold]:
        self._refuse_arriving()
        if message.kv_transfer is not None:
            self._arriving = message.request_id, message.kv_transfer
        return []

    def admitted(self, request_id: str) -> None:
        """Begin to pull the prefix of a new request, which is held, or note that its blocks are to be offered."""
        arrived, self._arriving = self._arriving, None
        if arrived is None:
            return
        keys = self._scheduler.storable_keys(request_id)
        if arrived[1].is_pull:
            self._begin_pull(request_id, arrived[1], keys)
        else:
            self._offers[request_id] = Offer(str(uuid.uuid4()), keys, list(keys))

    def advance(self) -> list[RequestUpdate]:
        self._refuse_arriving()
        self._end_jobs()
        self._jobs.start_due()
        self._count_leases()
        self._release_pulled()
        return [*self._pop_failed(), *self._pop_offered()]

    def stepped(self, updates: list[RequestUpdate]) -> None:
        """Begin to copy what the step has computed, and withhold last updates whose copies are not complete."""
        forgotten = self._watch.pop().forgotten
        if forgotten:
            self._forget(forgotten)
        for update in updates:
            self._add_range(update)
        ended = [update for update in updates if update.finish_reason is not None]
        for update in ended:
            offer = self._offers.pop(update.request_id, None)
            if offer is not None and self._is_withheld(offer, update):
                updates.remove(update)
        self._drop_aborted()
        self._end_jobs()
        for offer in [*self._offers.values(), *self._ending]:
            self._begin_saves(offer)
        self._jobs.start_due()

    def add_stats(self, stats: SchedulerStats) -> None:
        stats.transfer = msgspec.structs.replace(self._stats)

    def settle(self, run_step: Callable[[], object]) -> None:
        """End all transfers, for `SETTLE_S` at most; unlike `advance`, it sends no update."""
        until = self._clock() + tier.SETTLE_S
        while self._jobs and self._clock() < until:
            self._jobs.wait(run_step, lambda: time.sleep(tier.POLL_S))
            self._end_jobs()
            self._jobs.start_due()

    # Pulls

    def _begin_pull(self, request_id: str, source: KVTransfer, keys: list[BlockHash]) -> None:
        if not keys or all(map(self._scheduler.is_cached, keys)):
            self._end_lease(source)
            return
        self._stats.num_pulls += 1
        now = self._clock()
        if now < self._health_of(source).rest_until:
            self._note_short(request_id)
            return
        self._num_holds += 1
        hold = f"pulled prefix {self._num_holds}"
        lookup = self._executor.move_rows("find", [(key, 0) for key in keys], source.place)
        until, renew_at = now + self._extra.pull_timeout_s, now + self._extra.lease_s / 3
        self._scheduler.hold(request_id, Hold(hold, Cause.NOT_READY, DETAIL), now)
        self._pulls.append(Pull(request_id, hold, keys, source, lookup, until, renew_at))

    def _release_pulled(self) -> None:
        """Release requests whose blocks are here, or which have waited long enough, and end their leases."""
        pulls, self._pulls = self._pulls, []
        now = self._clock()
        for pull in pulls:
            is_waiting = self._scheduler.is_unfinished(pull.request_id) and self._is_pulling(pull)
            if is_waiting and now < pull.until:
                self._renew(pull, now)
                self._pulls.append(pull)
                continue
            if is_waiting:
                self._rest(pull.source, "it took too long")
            self._end_pull(pull, is_short=pull.is_short or is_waiting)

    def _is_pulling(self, pull: Pull) -> bool:
        """Take a pull as far as it gets; False if nothing is left to wait for."""
        if pull.lookup is not None and pull.lookup.done():
            found, pull.lookup = pull.lookup.result(), None
            self._begin_load(pull, found)
            self._jobs.start_due()
        return pull.lookup is not None or bool(pull.jobs)

    def _begin_load(self, pull: Pull, found: RowResult) -> None:
        """Begin to load what the other engine has of a request's prefix."""
        self._note_health(pull.source, found)
        here = [key for key, is_there in zip(pull.keys, found.done, strict=True) if is_there]
        stored = [key for key in here if self._jobs.is_right(key)]
        pull.is_short = self._lacks(pull.keys, found.done)
        load = self._scheduler.begin_load(pull.request_id, stored) if stored else None
        if load is None or load.end == load.start:
            return
        shared = set(load.shared)
        pull.jobs = {job for job in self._jobs if job.action == "load" and not shared.isdisjoint(job.keys)}
        if load.transfers:
            job = RowsJob("load", load.transfers, self._scheduler.num_steps, pull.source.place)
            self._jobs.add(job)
            pull.jobs.add(job)
        self._ranges[pull.request_id] = (load.start, load.end)
        if len(self._ranges) > tier.MOST_REMEMBERED:
            self._ranges.popitem(last=False)

    def _lacks(self, keys: Sequence[BlockHash], found: Sequence[bool]) -> bool:
        """Return whether blocks are missing; of several groups, some keep but few, so that any may be all there are."""
        have = [is_there or self._scheduler.is_cached(key) for key, is_there in zip(keys, found, strict=True)]
        return not (all(have) if self._has_one_group else any(have))

    def _end_pull(self, pull: Pull, *, is_short: bool) -> None:
        now = self._clock()
        if is_short:
            self._note_short(pull.request_id)
            if self._scheduler.is_unfinished(pull.request_id):  # The reason remains for `explain`.
                self._scheduler.hold(
                    pull.request_id, Hold(f"{pull.hold} failed", Cause.NOT_READY, FAILED), now
                )
        self._scheduler.release(pull.hold, now)
        self._scheduler.release(f"{pull.hold} failed", now)
        self._end_lease(pull.source)

    def _note_short(self, request_id: str) -> None:
        """Note a pull that did not bring everything: the request computes the rest, or ends, by the policy."""
        self._stats.num_failed_pulls += 1
        if self._fails:
            self._failed.append(request_id)

    def _pop_failed(self) -> list[RequestUpdate]:
        """End the requests that the policy does not let compute; returns their last updates."""
        failed, self._failed = self._failed, []
        ends = self._scheduler.finish_requests(failed, "error", self._clock())
        for end in ends:
            end.error = PULL_FAILED
        return ends

    def _renew(self, pull: Pull, now: float) -> None:
        if now >= pull.renew_at:
            pull.renew_at = now + self._extra.lease_s / 3
            self._executor.move_rows("touch", [(pull.source.lease.encode(), 0)], pull.source.place)

    def _end_lease(self, source: KVTransfer) -> None:
        """Notify the other engine that its blocks are not needed any more, unless it does not answer anyway."""
        if self._clock() >= self._health_of(source).rest_until:
            self._executor.move_rows("remove", [(source.lease.encode(), 0)], source.place)

    def _refuse_arriving(self) -> None:
        """End the lease of a request that was not admitted."""
        arrived, self._arriving = self._arriving, None
        if arrived is not None and arrived[1].is_pull:
            self._end_lease(arrived[1])

    def _add_range(self, update: RequestUpdate) -> None:
        """Say in a request's first and last update how many of its cached tokens were pulled."""
        start, end = self._ranges.get(update.request_id, (0, 0))
        update.num_stored_tokens += max(min(end, update.num_cached_tokens) - start, 0)
        if update.finish_reason is not None:
            self._ranges.pop(update.request_id, None)

    # Offers

    def _is_withheld(self, offer: Offer, update: RequestUpdate) -> bool:
        """Take over the last update of a request; False if nothing is to be offered."""
        if update.finish_reason not in ("length", "stop"):
            self._withdraw(offer)
            return False
        offer.last, offer.until = update, self._clock() + OFFER_S
        self._ending.append(offer)
        return True

    def _begin_saves(self, offer: Offer) -> None:
        """Have the next plan copy blocks to the host, head first, as far as they are computed and there is room.

        What another transfer has in hand is tried again.
        """
        keys = self._savable(offer)
        transfers = self._scheduler.begin_saves(keys) if keys else []
        begun = {transfer.key for transfer in transfers}
        offer.todo = [key for key in offer.todo if key not in begun]
        offer.retry_at = self._clock() + tier.POLL_S
        if transfers:
            lease = offer.lease.encode()
            job = RowsJob("save", transfers, self._scheduler.num_steps + 1, OFFERS, lease)
            self._jobs.add(job)
            offer.jobs.add(job)

    def _savable(self, offer: Offer) -> list[BlockHash]:
        """Return the next keys to save: computed ones, for half of the free host blocks at most."""
        free = self._scheduler.num_free_host_blocks
        room = min(tier.BATCH_ROWS, max(free // 2, min(free, 1)))
        if offer.last is None:
            return list(itertools.takewhile(self._scheduler.is_cached, offer.todo[:room]))
        offer.todo = [
            key for key in offer.todo if self._scheduler.is_cached(key) and self._jobs.is_right(key)
        ]
        return offer.todo[:room]

    def _pop_offered(self) -> Iterator[RequestUpdate]:
        """Yield withheld updates whose blocks are all copied, or whose time is over."""
        ending, self._ending = self._ending, []
        for offer in ending:
            self._begin_saves(offer)
            if (offer.todo or offer.jobs) and self._clock() < offer.until:
                self._ending.append(offer)
            else:
                yield self._offered(offer)

    def _offered(self, offer: Offer) -> RequestUpdate:
        assert offer.last is not None, "only of a finished request"
        num_kept = next(
            (place for place, key in enumerate(offer.keys) if key not in offer.kept), len(offer.keys)
        )
        self._stats.num_offers += 1
        self._count_at = self._clock()
        self._stats.num_offered += len(offer.kept)
        self._stats.num_unoffered += len(offer.keys) - len(offer.kept)
        offer.last.kv_offer = KVOffer(
            lease=offer.lease,
            num_tokens=self._scheduler.tokens_of(num_kept),
            num_blocks=num_kept,
            expires_at=time.time() + self._extra.lease_s,
            host=self._info.host,
            port=self._info.port,
            engine_id=self._engine_id,
            tp_size=self._parallel.tensor_parallel_size,
            pp_size=self._parallel.pipeline_parallel_size,
        )
        return offer.last

    def _drop_aborted(self) -> None:
        gone = [name for name in self._offers if not self._scheduler.is_unfinished(name)]
        for name in gone:
            self._withdraw(self._offers.pop(name))

    def _withdraw(self, offer: Offer) -> None:
        """End the lease of a request that was not completed, once nothing is copied for it any more."""
        if offer.jobs:
            self._withdrawn.append(offer)
        elif offer.kept:
            self._executor.move_rows("remove", [(offer.lease.encode(), 0)], OFFERS)

    def _forget(self, keys: Sequence[BlockHash]) -> None:
        """Remove content that proved wrong, also where it is on its way."""
        self._jobs.forget(keys)
        if self._info.port:
            self._executor.move_rows("remove", [(key, 0) for key in keys], OFFERS)

    def _count_leases(self) -> None:
        """Count the leases now and then, as long as there are any: other engines end them."""
        now = self._clock()
        if self._count is not None and self._count.done():
            leases, self._count = self._count.result().leases or LeaseStats(), None
            self._stats.num_leases, self._stats.oldest_lease_s = leases.num_leases, leases.oldest_s
            self._count_at = now + LEASES_S if leases.num_leases else math.inf
        elif self._count is None and self._count_at <= now:
            self._count_at = math.inf
            self._count = self._executor.move_rows("list", [], OFFERS)

    # Jobs and health

    def _end_jobs(self) -> None:
        for ended in self._jobs.pop_ended():
            job, moved = ended.job, ended.moved
            if job.action == "load":
                self._note_loaded(job, ended.result, moved)
                continue
            kept = {transfer.key for transfer, done in zip(job.transfers, moved, strict=True) if done}
            for offer in [*self._offers.values(), *self._ending, *self._withdrawn]:
                if job in offer.jobs:
                    offer.jobs.remove(job)
                    offer.kept |= kept
        withdrawn, self._withdrawn = self._withdrawn, []
        for offer in withdrawn:
            self._withdraw(offer)
        self._jobs.forgive()

    def _note_loaded(self, job: RowsJob, result: RowResult, moved: list[bool]) -> None:
        self._stats.num_pulled += sum(moved)
        for pull in self._pulls:
            if job in pull.jobs:
                pull.jobs.remove(job)
                pull.is_short |= not all(moved)
                self._note_health(pull.source, result)

    def _health_of(self, source: KVTransfer) -> _Health:
        return self._health.setdefault(source.place, _Health())

    def _note_health(self, source: KVTransfer, result: RowResult) -> None:
        if result.failure is None:
            self._health_of(source).rest_s = REST_S
        else:
            self._rest(source, result.failure)

    def _rest(self, source: KVTransfer, reason: str) -> None:
        """Pull nothing from an engine for a while."""
        health, now = self._health_of(source), self._clock()
        if now >= health.rest_until:
            logger.warning("nothing is pulled from %s for %g s: %s", source.place, health.rest_s, reason)
            health.rest_until = now + health.rest_s
            health.rest_s = min(2 * health.rest_s, MOST_REST_S)
