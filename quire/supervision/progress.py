# SPDX-License-Identifier: Apache-2.0
"""Hang detection and restart policy of engine cores.

`ExpectedCosts`: estimates of step durations that err upward. A step costs a constant, plus a cost per token and per
attended position; k times the tokens and positions cost at most k times as much. Steps are classified by both, with
classes that double in width.

`Supervisor`: pure except for its clock; it decides, and the caller restarts. Restarts are bounded: a request is given
to a third core only if it was not being worked on when two died, and the 4th death of a core within WINDOW_S ends the
engine.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import NamedTuple, cast

from quire.config.scheduler import BUSY_FACTOR
from quire.engine.core_progress import ProgressFile
from quire.engine.supervision import STALL_S, Supervision, Verdict
from quire.executor.base import Executor
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput

WINDOW_S = 600.0
# Delay before a restart, after the first, second and third death within WINDOW_S.
BACKOFF_S = (0.0, 1.0, 5.0)
MAX_DEATHS = len(BACKOFF_S)


class SuspectRequests:
    """Record of requests that were being worked on when cores died, for one front end.

    Args:
        resume: whether requests in flight resume in the new core.
    """

    def __init__(self, *, resume: bool) -> None:
        self._resume = resume
        self._suspects: Set[str] = frozenset()

    def failed(self, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str]) -> frozenset[str]:
        """Return the requests that are not resumed after a core's death, given its requests in flight and in work.

        Others are in flight `elsewhere`, possibly moved there from a core that died.
        """
        if not self._resume:
            return frozenset(in_flight)
        suspects = self._suspects
        self._suspects = (suspects | in_work) & (in_flight | elsewhere)
        return frozenset(suspects & in_work)


class Supervisor:
    """Record of the deaths of an engine's cores.

    Args:
        resume: whether requests in flight resume in the new core.
        clock: monotonic seconds.
    """

    def __init__(self, *, resume: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._blame = SuspectRequests(resume=resume)
        self._clock = clock
        self._deaths: defaultdict[int, deque[float]] = defaultdict(deque)

    def died(
        self, core: int, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str] = frozenset()
    ) -> Verdict:
        """Decide about a dead core, given its requests in flight and in work; others are `elsewhere`."""
        now, deaths = self._clock(), self._deaths[core]
        while deaths and deaths[0] <= now - WINDOW_S:
            deaths.popleft()
        deaths.append(now)
        if len(deaths) > MAX_DEATHS:
            which = f"it was the {MAX_DEATHS + 1}th death in {WINDOW_S / 60:g} minutes"
            return Verdict(None, reason=which)
        return Verdict(BACKOFF_S[len(deaths) - 1], self._blame.failed(in_flight, in_work, elsewhere))

    def left(self, in_flight: Set[str], in_work: Set[str], elsewhere: Set[str] = frozenset()) -> Verdict:
        """Decide about a core that its own host restarts: it may return at any time."""
        return Verdict(0.0, self._blame.failed(in_flight, in_work, elsewhere))


DECAY = 0.95  # Decay of a class's longest time at each shorter step, so that a single delay is forgotten.


class Work(NamedTuple):
    """Work of a step."""

    tokens: int
    positions: int  # Attended positions of all tokens, themselves included.


def work_of(plan: SchedulerOutput) -> Work:
    """Return the work of all requests together; further decode steps are bounded in time and not counted."""
    tokens = positions = 0
    for one in plan.scheduled:
        tokens += one.num_tokens
        positions += one.num_tokens * (one.start + one.num_tokens)
    return Work(tokens, positions)


class ExpectedCosts:
    """Estimates of step durations, learned from every step."""

    def __init__(self) -> None:
        self._longest: dict[Work, float] = {}  # Seconds, by class.

    def note(self, work: Work, seconds: float) -> None:
        """Record the duration of a step."""
        kind = _class_of(work)
        self._longest[kind] = max(seconds, DECAY * self._longest.get(kind, 0.0))

    def of(self, work: Work) -> float | None:
        """Return the expected seconds; None: unknown."""
        kind = _class_of(work)
        known = self._longest.get(kind)
        if known is not None:
            return known
        return min([seconds * _times(kind, other) for other, seconds in self._longest.items()], default=None)


def _class_of(work: Work) -> Work:
    """Return the class: the bit lengths of both numbers."""
    return Work(work.tokens.bit_length(), work.positions.bit_length())


def _times(kind: Work, other: Work) -> int:
    """Return how many steps of class `other` cover any step of class `kind`."""
    doublings = max(kind.tokens - other.tokens, kind.positions - other.positions)
    return 1 << max(doublings + 1, 0)


KNOWN_BUSY_FACTOR = 2  # Timeouts that a core may compute without a step if its expected duration is known.
LONGEST_FACTOR = 10  # Multiple of the expected, or the longest, step duration that is allowed.
MAX_POLL_S = 1.0  # Longer intervals between polls are not the core's silence: the poller itself was delayed.
TICK_S = 0.01  # Clock tick of processor time in the kernel; one tick may be the parent watchdog's.


class ProgressExecutor:
    """Executor proxy for the loop. The oldest step in flight is being computed, the others wait for it."""

    def __init__(
        self,
        executor: Executor,
        progress: ProgressFile,
        costs: ExpectedCosts | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._progress = progress
        self._costs = costs
        self._clock = clock
        self._in_work: deque[Work] = deque()
        self._began = 0.0
        executor.note_encoding = self.note_encoding

    def submit(self, plan: SchedulerOutput) -> None:
        self._begin(plan)
        self._executor.submit(plan)

    def collect(self) -> ModelRunnerOutput:
        output = self._executor.collect()
        self._end()
        return output

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._begin(plan)
        output = self._executor.execute_model(plan)
        self._end()
        return output

    def note_encoding(self, request_ids: Sequence[str]) -> None:
        """See `Executor.note_encoding`."""
        self._progress.encode(request_ids, beside_steps=bool(self._in_work) or not request_ids)

    def _begin(self, plan: SchedulerOutput) -> None:
        self._progress.begin(plan)
        if not self._in_work:
            self._began = self._clock()
        self._in_work.append(work_of(plan))
        self._publish_expectation()

    def _end(self) -> None:
        work, now = self._in_work.popleft(), self._clock()
        if self._costs is not None:
            self._costs.note(work, now - self._began)
        self._began = now
        self._publish_expectation()

    def _publish_expectation(self) -> None:
        """Publish the expected duration of all steps in work, since the loop may wait for all of them."""
        if self._costs is None:
            return
        each = [seconds for work in self._in_work if (seconds := self._costs.of(work)) is not None]
        self._progress.expect(sum(each) if len(each) == len(self._in_work) else None)


class Heartbeat:
    """Detector of hanging cores, as opposed to long computations; polled while the core is silent.

    A core whose loop does not advance hangs if its process used no processor time for `timeout_s` either (it was
    stopped, or is blocked), or if it took much longer than its steps should, or, if that is unknown, than any step
    could.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._polled_at = 0.0
        self._num_turns = 0
        self._cpu_s: float | None = None
        self._longest_s = 0.0
        self.silent_s = 0.0
        self._idle_s = 0.0

    @property
    def stalls(self) -> bool:
        """True if the core, at the last poll, had been idle without progress for longer than STALL_S."""
        return self._idle_s > STALL_S

    def poll(self, progress: ProgressFile, pid: int) -> bool:
        """Poll a silent core's process and its progress; return whether the core hangs."""
        used = cpu_seconds_with_children(pid)
        return self.hangs(time.monotonic(), progress.num_turns, used, progress.expected_s)

    def hangs(self, now: float, num_turns: int, cpu_s: float | None, expected_s: float | None = None) -> bool:
        """Poll with the time, the loop iterations, the processor time used (None: unknown, so it may compute), and the
        expected duration of the steps in work (None: unknown); returns whether the core hangs.
        """
        elapsed, self._polled_at = min(now - self._polled_at, MAX_POLL_S), now
        used, self._cpu_s = _difference(cpu_s, self._cpu_s), cpu_s
        if num_turns != self._num_turns:
            if self._num_turns:  # loading is not a step
                self._longest_s = max(self._longest_s, self.silent_s)
            self._num_turns, self.silent_s, self._idle_s = num_turns, 0.0, 0.0
        if not num_turns:
            return False
        self.silent_s += elapsed
        computes = used is None or round(used / TICK_S) > 1
        self._idle_s = 0.0 if computes else self._idle_s + elapsed
        too_long = self._idle_s > self._timeout_s or self.silent_s > self._longest_allowed_s(expected_s)
        return too_long and self._timeout_s > 0

    def _longest_allowed_s(self, expected_s: float | None) -> float:
        any_step = max(BUSY_FACTOR * self._timeout_s, LONGEST_FACTOR * self._longest_s)
        if expected_s is None:
            return any_step
        return min(any_step, max(KNOWN_BUSY_FACTOR * self._timeout_s, LONGEST_FACTOR * expected_s))


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time used by a process with all its threads; None if unavailable (not Linux)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) * TICK_S


def cpu_seconds_with_children(pid: int) -> float | None:
    """Return the processor time including running child processes, such as the ranks of a core."""
    own = cpu_seconds(pid)
    if own is None:
        return None
    return own + sum(cpu_seconds(child) or 0.0 for child in _children(pid))


def _children(pid: int) -> list[int]:
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # the process or a thread has ended meanwhile
        return []
    return [int(child) for children in lists for child in children.split()]


class CoreSupervision(Supervision):
    """Supervision by this module."""

    def make_supervisor(self, *, resume: bool) -> Supervisor:
        return Supervisor(resume=resume)

    def make_hang_detector(self, timeout_s: float) -> Heartbeat:
        return Heartbeat(timeout_s)

    def observed(self, executor: Executor, progress: ProgressFile, *, is_alone: bool) -> Executor:
        return cast("Executor", ProgressExecutor(executor, progress, ExpectedCosts() if is_alone else None))
