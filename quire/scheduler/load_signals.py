"""Signals for autoscalers: saturation of one engine, and the time that a new request would wait.

The wait is Little's law (Little, 1961, "A Proof for the Queuing Formula L = lambda W"): requests that wait, divided by
the rate at which waiting requests have started. Starts count only while a queue exists, since requests that start at
once do not show the engine's capacity. Invariant: pure; times come in as arguments.
"""

from __future__ import annotations

import math

from quire.config import SchedulerConfig

WINDOW_S = 30.0  # Starts that lie further back count e times less.
FULL = 0.8  # Saturation of an engine whose batch is full and whose queue is empty.


class LoadSignals:
    """Load of one scheduler.

    Args:
        limits: of the batch and the queue.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self._max_running = limits.max_num_seqs
        self._max_queued = limits.max_num_queued_reqs
        self._began = 0.0  # when the present queue began
        self._has_queue = False
        self._starts = 0.0  # since then, decayed to `_noted`
        self._noted = 0.0
        self._rate = 0.0  # starts per second while a queue existed; 0.0: unknown

    def note(self, now: float, num_started: int, num_waiting: int) -> None:
        """Note a plan: requests that it starts, and those that wait behind it."""
        if not num_waiting:
            self._has_queue = False
            return
        if not self._has_queue:  # the first plan fills free places
            self._has_queue, self._began, self._noted, self._starts = True, now, now, 0.0
            return
        self._starts = self._starts * math.exp((self._noted - now) / WINDOW_S) + num_started
        self._noted = now
        if num_started and now > self._began:
            weight = WINDOW_S * -math.expm1(
                (self._began - now) / WINDOW_S
            )  # integral of the decay since the beginning
            self._rate = self._starts / weight

    def wait_s(self, num_waiting: int) -> float:
        """Return the seconds that a request behind the waiting ones would wait; 0.0 while that is unknown."""
        return num_waiting / self._rate if self._rate else 0.0

    def may_refuse(self, num_unfinished: int) -> bool:
        """Return whether so many requests could fill the queue nearly to its limit; else it need not be counted."""
        return bool(self._max_queued) and num_unfinished >= FULL * self._max_queued

    def saturation(
        self, num_running: int, num_waiting: int, num_unanswered: int, cache_usage: float
    ) -> float:
        """Return the saturation from 0 to 1.

        It is 0.8 when the batch or the KV cache is full, or as many requests wait as the batch takes; above, it is the
        fraction of --max-num-queued-reqs, which reaches 1 when requests are refused.

        Args:
            num_unanswered: requests without a token, waiting ones included; 0 unless `may_refuse`.
            cache_usage: fraction of the KV cache that requests hold.
        """
        demand = (num_running + num_waiting) / max(self._max_running, 1)
        queue = num_unanswered / self._max_queued if self._max_queued else 0.0
        return max(FULL * min(max(demand, cache_usage), 1.0), min(queue, 1.0))
