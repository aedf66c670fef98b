# SPDX-License-Identifier: Apache-2.0
"""Rows on their way between the host tier and other places; the part that tiers share.

Invariant: the host blocks of a job are borrowed from the scheduler until its rows have moved, and given back once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from quire.engine.step_loop import Clock
from quire.executor.base import Executor
from quire.kv_cache.hashing import BlockHash
from quire.kv_cache.rows import STORE, RowAction, RowResult
from quire.kv_cache.transfers import Transfer
from quire.scheduler.scheduler import Scheduler


@dataclass(eq=False)
class RowsJob:
    """Rows on their way; `due` is the step that must have returned before they move.

    `lease`, if any, is the first row of the action, and no block.
    """

    action: RowAction
    transfers: list[Transfer]
    due: int
    place: str = STORE
    lease: bytes | None = None
    future: Future[RowResult] | None = None
    started_at: float = 0.0

    @property
    def keys(self) -> list[BlockHash]:
        return [transfer.key for transfer in self.transfers]


@dataclass(eq=False)
class EndedJob:
    """Job whose blocks were given back; `moved` has an entry for each of its transfers."""

    job: RowsJob
    result: RowResult
    moved: list[bool] = field(default_factory=list)


class RowJobs:
    """Jobs of one tier."""

    def __init__(self, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        self._executor, self._scheduler, self._clock = executor, scheduler, clock
        self._jobs: list[RowsJob] = []
        self._wrong: set[BlockHash] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[RowsJob]:
        return iter(self._jobs)

    def add(self, job: RowsJob) -> None:
        self._jobs.append(job)

    @property
    def has_work(self) -> bool:
        """True if a job can start, waits for a step, or has ended."""
        return any(job.future is None or job.future.done() for job in self._jobs)

    def is_right(self, key: BlockHash) -> bool:
        """Return whether content has not become wrong while jobs were on their way."""
        return key not in self._wrong

    def forget(self, keys: Sequence[BlockHash]) -> None:
        """Note content that proved wrong: rows of it that have not moved yet do not."""
        self._wrong.update(keys)

    def start_due(self) -> None:
        """Start the jobs whose blocks no plan will touch any more."""
        for job in self._jobs:
            if job.future is None and self._is_due(job):
                self._start(job)

    def pop_ended(self) -> list[EndedJob]:
        """Give back the blocks of rows that have moved, and of those that could not."""
        ended = []
        for job in [job for job in self._jobs if job.future is not None and job.future.done()]:
            assert job.future is not None
            result = job.future.result()
            moved = result.done if job.lease is None else result.done[1:]
            rows = zip(job.transfers, moved, strict=True)
            self._scheduler.end_transfers([(transfer.block_id, done) for transfer, done in rows])
            self._jobs.remove(job)
            ended.append(EndedJob(job, result, moved))
        return ended

    def forgive(self) -> None:
        """Forget what was wrong, if nothing is on its way."""
        if not self._jobs:
            self._wrong.clear()

    def wait(self, run_step: Callable[[], object], rest: Callable[[], object]) -> None:
        """Take one part of the way to having no job: run a step that copies blocks, or rest until rows have moved."""
        if self._scheduler.has_moves or any(not self._is_due(job) for job in self._jobs):
            run_step()
        else:
            rest()

    def _is_due(self, job: RowsJob) -> bool:
        return self._scheduler.num_steps_done >= job.due

    def _start(self, job: RowsJob) -> None:
        wrong = [transfer for transfer in job.transfers if transfer.key in self._wrong]
        self._scheduler.end_transfers([(transfer.block_id, False) for transfer in wrong])
        job.transfers = [transfer for transfer in job.transfers if transfer.key not in self._wrong]
        job.started_at = self._clock()
        lease = [] if job.lease is None else [(job.lease, 0)]
        rows = [*lease, *job.transfers]
        job.future = self._executor.move_rows(job.action, rows, job.place)


def can_go_on(lookup: Future[RowResult] | None, jobs: Collection[RowsJob]) -> bool:
    """Return whether a held request's lookup has ended, or else its jobs: also after `advance`, behind the step."""
    return not jobs if lookup is None else lookup.done()
