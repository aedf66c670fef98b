# SPDX-License-Identifier: Apache-2.0
"""`ConsoleRecorder`: frames of an engine core for the console, made only while a page asks for them.

Invariant: without a page, nothing is installed in the scheduler and nothing is recorded. With pages, however many, a
frame is made at most every `MIN_INTERVAL_S`, and so rarely that making frames takes at most `MOST_OF_TIME` of the
core's time; in between all pages get the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from quire.console.frames import (
    BlockRow,
    BlockStates,
    Frame,
    RequestRow,
    StepRow,
    block_row,
    block_states,
    counts_of,
    encode_ids,
    request_row,
    step_row,
    store_state,
)
from quire.engine.core_feature import CoreFeature, users_of
from quire.kv_cache.block_pool import BlockPool, KVCacheBlock
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.request import Request
from quire.scheduler.step import StepPlan

MIN_INTERVAL_S = 0.25
MOST_OF_TIME = 0.005
LEASE_S = 10.0  # Recording of steps ends so long after the last query.
MAX_STEPS = 512
MAX_REQUESTS = 128  # In a frame.
MAX_BLOCKS = 16_384  # In a frame, of each tier.
MAX_ENTRIES = 16_384  # Table entries in a frame.
MAX_HOLDERS = 64


class ConsoleRecorder(CoreFeature):
    """Answers the utility calls `console_frame` and `console_block`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._steps: deque[StepRow] = deque(maxlen=MAX_STEPS)
        self._lease_end = 0.0
        self._frame: Frame | None = None
        self._num_frames = 0
        self._next_ts = 0.0
        self._first_blocks = {False: 0, True: 0}  # on host -> where the next frame's part begins
        self._first_request = 0  # number of the request whose blocks come first in the next frame

    @cached_property
    def _room_of_store(self) -> int:
        """Return how many blocks the directory of the store may hold; 0: the store is a server."""
        asked = self._executor.config.kv_store
        row_bytes = 0 if asked.is_peer else self._executor.open_row_store().row_bytes
        return asked.max_bytes // row_bytes if row_bytes else 0

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {"console_frame": self.frame, "console_block": self.block}

    def frame(self, after_step: int = 0) -> Frame:
        """Return the present frame, with steps that finished after one of them; records steps for a while."""
        now = self._clock()
        self._record_until(now + LEASE_S)
        if self._frame is None or now >= self._next_ts:
            self._num_frames += 1
            self._frame = self._make_frame(self._num_frames, now)
            self._next_ts = now + max(MIN_INTERVAL_S, (self._clock() - now) / MOST_OF_TIME)
        steps = [step for step in self._steps if step.step_id > after_step]
        next_s = max(self._next_ts - now, 0.0)
        return msgspec.structs.replace(self._frame, steps=steps, next_s=next_s)

    def block(self, tier: str, block_id: int) -> BlockRow | None:
        """Return the state of one block; None if there is none of this tier and number."""
        return block_row(self._scheduler.kv, tier, block_id, MAX_HOLDERS)

    def close(self) -> None:
        self._stop()

    # Steps

    def _record_until(self, lease_end: float) -> None:
        if not self._lease_end:
            self._scheduler.observe(self._note)
        self._lease_end = lease_end

    def _note(self, step: StepPlan, plan: SchedulerOutput, output: ModelRunnerOutput, now: float) -> None:
        """Record a step, or end the recording if no page has asked for long."""
        if not step.chunks:
            return
        if now > self._lease_end:
            self._stop()
        else:
            self._steps.append(step_row(step, plan, output, now))

    def _stop(self) -> None:
        """Remove everything that recording needs."""
        if self._lease_end:
            self._scheduler.observe(None)
        self._lease_end = 0.0
        self._steps.clear()
        self._frame = None

    # Frames

    def _make_frame(self, number: int, now: float) -> Frame:
        scheduler, kv = self._scheduler, self._scheduler.kv
        stats = scheduler.stats()
        for feature in users_of("add_stats", self.others):
            feature.add_stats(stats)
        return Frame(
            number=number,
            now=now,
            next_s=0.0,
            block_size=kv.block_size,
            num_requests=stats.num_running + stats.num_waiting,
            stats=counts_of(stats),
            requests=self._request_rows(scheduler.in_order(MAX_REQUESTS), now),
            device=self._part(kv.pool),
            host=self._part(kv.pool.host.pool, on_host=True),
            steps=[],
            store=None if stats.store is None else store_state(stats.store, self._room_of_store),
        )

    def _part(self, pool: BlockPool, *, on_host: bool = False) -> BlockStates:
        """Return the next part of a tier's blocks."""
        first = self._first_blocks[on_host]
        self._first_blocks[on_host] = 0 if first + MAX_BLOCKS >= len(pool.blocks) else first + MAX_BLOCKS
        return block_states(pool, first, MAX_BLOCKS)

    def _request_rows(self, requests: Sequence[Request], now: float) -> list[RequestRow]:
        """Return a row for each request; those whose blocks do not fit begin in the next frame."""
        blocks = self._encoded_tables(requests)
        return [request_row(request, now, blocks.get(request.request_id)) for request in requests]

    def _encoded_tables(self, requests: Sequence[Request]) -> dict[str, tuple[str, str]]:
        """Return request id -> block ids on the device and on the host, within the budget of entries."""
        encoded: dict[str, tuple[str, str]] = {}
        start = self._first_request % max(len(requests), 1)
        room = MAX_ENTRIES
        for place, request in enumerate((*requests[start:], *requests[:start]), start):
            device, host = self._tables_of(request.request_id)
            room -= sum(map(len, device)) + sum(map(len, host))
            if room < 0 and encoded:
                self._first_request = place
                return encoded
            encoded[request.request_id] = encode_ids(device), encode_ids(host)
        self._first_request = 0
        return encoded

    def _tables_of(
        self, request_id: str
    ) -> tuple[list[Sequence[KVCacheBlock]], Sequence[Sequence[KVCacheBlock]]]:
        kv = self._scheduler.kv
        swapped = kv.pool.host.swapped.get(request_id)
        device = [manager.tables.get(request_id, ()) for manager in kv.managers]
        return device, () if swapped is None else swapped.tables
