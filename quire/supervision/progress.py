# SPDX-License-Identifier: Apache-2.0
"""Progress, hang detection and restart policy of engine cores.

`Progress`: shared memory that outlives the core. The core writes, its parent reads, and neither waits for the other.
Requests are written before work on them begins, so they are known however the core ended.

`ExpectedCosts`: estimates of step durations that err upward. A step costs a constant, plus a cost per token and per
attended position; k times the tokens and positions cost at most k times as much. Steps are classified by both, with
classes that double in width.

`Supervisor`: pure except for its clock; it decides, and the caller restarts. Restarts are bounded: a request is given
to a third core only if it was not being worked on when two died, and the 4th death of a core within WINDOW_S ends the
engine.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from quire.config.scheduler import BUSY_FACTOR
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from quire.executor.base import Executor


WINDOW_S = 600.0
# Delay before a restart, after the first, second and third death within WINDOW_S.
BACKOFF_S = (0.0, 1.0, 5.0)
MAX_DEATHS = len(BACKOFF_S)


@dataclass(frozen=True)
class Verdict:
    """Delay of the restart (None: the engine has died with the core), and the requests that are not resumed."""

    restart_in_s: float | None
    failed: frozenset[str] = frozenset()


class Blame:
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
        self._blame = Blame(resume=resume)
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
            return Verdict(None)
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
STALL_S = 5.0  # A core without progress and computation for so long is not ready for requests.
TICK_S = 0.01  # Clock tick of processor time in the kernel; one tick may be the parent watchdog's.

STAGES = ("starting", "weights", "warm_up", "kv_cache")
"""Stages of loading: the process starts, weights are read, the largest steps run once, the KV cache is made."""


class LoadingState(NamedTuple):
    """Stage of a core that loads, with the bytes of weights read so far and altogether; 0: unknown."""

    stage: str
    done_bytes: int
    total_bytes: int
    elapsed_s: float

    @property
    def seconds_left(self) -> float | None:
        """Estimate of what is left of the weights; None: unknown."""
        if not self.done_bytes or self.elapsed_s <= 0:
            return None
        return (self.total_bytes - self.done_bytes) * self.elapsed_s / self.done_bytes

    def __str__(self) -> str:
        """Return what a client reads: the stage, and what is left of it."""
        text = f"the model is loading: {self.stage}"
        if self.total_bytes:
            text += f", {self.done_bytes / 1e9:.2f} of {self.total_bytes / 1e9:.2f} GB"
        left_s = self.seconds_left
        return text if left_s is None else f"{text}, about {math.ceil(left_s)} s left"


_WORD = struct.Struct("<Q")
_NUM_TURNS, _NUM_ROWS, _EXPECTED_US, _STAGE, _DONE, _TOTAL, _SINCE_US, _ROWS = (
    place * _WORD.size for place in range(8)
)


class Progress:
    """File of words: loop iterations, number of requests in work, expected duration of the steps in work, stage of
    loading, and a digest of each request's id.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._rows: dict[str, bytes] = {}

    @staticmethod
    def create(path: Path, max_num_rows: int) -> Progress:
        """Create the file; raises OSError if there is no room. Later writes need none."""
        path.write_bytes(bytes(_ROWS + max_num_rows * _WORD.size))
        return Progress(path)

    @property
    def num_turns(self) -> int:
        """Iterations of the core's loop; 0 while it loads."""
        return self._word(_NUM_TURNS)

    def turn(self) -> None:
        """Count an iteration of the loop."""
        _WORD.pack_into(self._memory, _NUM_TURNS, self._word(_NUM_TURNS) + 1)

    def load(self) -> None:
        """Mark the core as loading, or unloading, until its next iteration."""
        _WORD.pack_into(self._memory, _NUM_TURNS, 0)

    def note_loading(self, stage: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Set the stage of loading, and what of it is done."""
        number = STAGES.index(stage)
        if number != self._word(_STAGE):
            _WORD.pack_into(self._memory, _SINCE_US, int(time.monotonic() * 1e6))
            _WORD.pack_into(self._memory, _STAGE, number)
        _WORD.pack_into(self._memory, _DONE, done_bytes)
        _WORD.pack_into(self._memory, _TOTAL, total_bytes)

    @property
    def loading(self) -> LoadingState | None:
        """Stage of loading; None: the core's loop has begun. Times are of the machine's monotonic clock."""
        if self.num_turns:
            return None
        elapsed_s = time.monotonic() - self._word(_SINCE_US) / 1e6
        stage = STAGES[min(self._word(_STAGE), len(STAGES) - 1)]
        return LoadingState(stage, self._word(_DONE), self._word(_TOTAL), elapsed_s)

    @property
    def expected_s(self) -> float | None:
        """Expected duration of the steps in work, in seconds; None: unknown."""
        return self._word(_EXPECTED_US) / 1e6 or None

    def expect(self, seconds: float | None) -> None:
        """Set the expected duration of the steps in work."""
        _WORD.pack_into(
            self._memory, _EXPECTED_US, 0 if seconds is None else max(1, math.ceil(seconds * 1e6))
        )

    def begin(self, plan: SchedulerOutput) -> None:
        """Record the requests of a plan before its execution."""
        if not plan.new_requests and not plan.removed_request_ids:
            return
        for request_id in plan.removed_request_ids:
            self._rows.pop(request_id, None)
        self._rows.update((data.request_id, _digest(data.request_id)) for data in plan.new_requests)
        self._write(self._rows.values())

    def encode(self, request_ids: Iterable[str], *, beside_steps: bool) -> None:
        """Record the requests whose media are encoded next, in place of those of plans unless steps are in work."""
        rows = self._rows.values() if beside_steps else ()
        self._write([*map(_digest, request_ids), *rows])

    def _write(self, each: Iterable[bytes]) -> None:
        digests = b"".join(each)[: len(self._memory) - _ROWS]
        self._memory[_ROWS : _ROWS + len(digests)] = digests
        _WORD.pack_into(self._memory, _NUM_ROWS, len(digests) // _WORD.size)

    def in_work(self, request_ids: Iterable[str]) -> set[str]:
        """Return the requests among these that the core works on, or worked on when it ended."""
        return requests_with_digests(self.digests(), request_ids)

    def digests(self) -> set[bytes]:
        """Return digests of the requests being worked on, or at its end; see `requests_with_digests`."""
        end = _ROWS + self._word(_NUM_ROWS) * _WORD.size
        return {self._memory[place : place + _WORD.size] for place in range(_ROWS, end, _WORD.size)}

    def _word(self, place: int) -> int:
        (value,) = _WORD.unpack_from(self._memory, place)
        return int(value)


def requests_with_digests(digests: Set[bytes], request_ids: Iterable[str]) -> set[str]:
    """Return the requests among these whose digest is in the set."""
    return {request_id for request_id in request_ids if _digest(request_id) in digests}


def _digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=_WORD.size).digest()


def with_progress(executor: Executor, progress: Progress, *, is_alone: bool = True) -> Executor:
    """Wrap an executor so that plans are recorded before they are executed.

    Args:
        is_alone: whether a step's duration depends on its own work only; false if other replicas take part.
    """
    return cast("Executor", ProgressExecutor(executor, progress, ExpectedCosts() if is_alone else None))


class ProgressExecutor:
    """Executor proxy for the loop. The oldest step in flight is being computed, the others wait for it."""

    def __init__(
        self,
        executor: Executor,
        progress: Progress,
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
