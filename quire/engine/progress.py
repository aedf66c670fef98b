"""How far a core has come, in memory that outlives it, and whether it still goes on.

Invariant: the core writes and its parent reads, and neither waits for the other. What a core wrote is there however it
ended, and what it was working on is written before the work begins.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, cast

from quire.config.supervision import BUSY_FACTOR
from quire.engine.expected_costs import ExpectedCosts, Work, work_of
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from quire.executor.base import Executor

KNOWN_BUSY_FACTOR = 2
"""So many timeouts may a core compute without a step where it is known how long the steps in work should take."""
LONGEST_FACTOR = 10
"""So many times as long as it should may a step take, or as the longest did."""
MAX_LOOK_S = 1.0
"""A longer time between two looks is no silence of the core: whoever looks was held up itself."""
STALL_S = 5.0
"""After so long a core that neither goes on nor computes is not ready for requests, whatever becomes of it."""
TICK_S = 0.01
"""The kernel counts processor time in these; one of them may be the thread that watches the parent."""

_WORD = struct.Struct("<Q")
_NUM_TURNS, _NUM_ROWS, _EXPECTED_US, _ROWS = (place * _WORD.size for place in range(4))


class Progress:
    """A file of words: turns of the loop, the number of requests in work, how long the steps in work should take, and a
    digest of each request's id."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._rows: dict[str, bytes] = {}

    @staticmethod
    def create(path: Path, max_num_rows: int) -> Progress:
        """Raises OSError: there is no room for it; writing to it later needs none."""
        path.write_bytes(bytes(_ROWS + max_num_rows * _WORD.size))
        return Progress(path)

    @property
    def num_turns(self) -> int:
        """Turns of the core's loop; 0 while it loads."""
        return self._word(_NUM_TURNS)

    def turn(self) -> None:
        """The loop goes on."""
        _WORD.pack_into(self._memory, _NUM_TURNS, self._word(_NUM_TURNS) + 1)

    def load(self) -> None:
        """The core loads again, or lets go of what it has loaded, until its next turn."""
        _WORD.pack_into(self._memory, _NUM_TURNS, 0)

    @property
    def expected_s(self) -> float | None:
        """How long the steps in work should take; None: not known."""
        return self._word(_EXPECTED_US) / 1e6 or None

    def expect(self, seconds: float | None) -> None:
        """The steps in work should take so long."""
        _WORD.pack_into(
            self._memory, _EXPECTED_US, 0 if seconds is None else max(1, math.ceil(seconds * 1e6))
        )

    def begin(self, plan: SchedulerOutput) -> None:
        """The core sets to work on this plan."""
        if not plan.new_requests and not plan.removed_request_ids:
            return
        for request_id in plan.removed_request_ids:
            self._rows.pop(request_id, None)
        self._rows.update((data.request_id, _digest(data.request_id)) for data in plan.new_requests)
        digests = b"".join(self._rows.values())[: len(self._memory) - _ROWS]
        self._memory[_ROWS : _ROWS + len(digests)] = digests
        _WORD.pack_into(self._memory, _NUM_ROWS, len(digests) // _WORD.size)

    def in_work(self, request_ids: Iterable[str]) -> set[str]:
        """Those of these requests on which the core works, or worked when it ended."""
        return named_in(self.digests(), request_ids)

    def digests(self) -> set[bytes]:
        """What stands for the requests on which the core works, or worked when it ended; see `named_in`."""
        end = _ROWS + self._word(_NUM_ROWS) * _WORD.size
        return {self._memory[place : place + _WORD.size] for place in range(_ROWS, end, _WORD.size)}

    def _word(self, place: int) -> int:
        (value,) = _WORD.unpack_from(self._memory, place)
        return int(value)


def named_in(digests: Set[bytes], request_ids: Iterable[str]) -> set[str]:
    """Those of these requests for which one of the digests stands."""
    return {request_id for request_id in request_ids if _digest(request_id) in digests}


def _digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=_WORD.size).digest()


def followed(executor: Executor, progress: Progress, *, is_alone: bool = True) -> Executor:
    """The same executor for a loop, whose plans are written down before they are carried out.

    Args:
        is_alone: whether a step takes as long as its own work; not so where others take part in it.
    """
    return cast("Executor", FollowedExecutor(executor, progress, ExpectedCosts() if is_alone else None))


class FollowedExecutor:
    """What a loop needs of an executor. Of steps in flight the oldest is being computed, and the others wait for it."""

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

    def _begin(self, plan: SchedulerOutput) -> None:
        self._progress.begin(plan)
        if not self._in_work:
            self._began = self._clock()
        self._in_work.append(work_of(plan))
        self._tell()

    def _end(self) -> None:
        work, now = self._in_work.popleft(), self._clock()
        if self._costs is not None:
            self._costs.note(work, now - self._began)
        self._began = now
        self._tell()

    def _tell(self) -> None:
        """What is in work may all have to be done before the loop turns."""
        if self._costs is None:
            return
        each = [seconds for work in self._in_work if (seconds := self._costs.of(work)) is not None]
        self._progress.expect(sum(each) if len(each) == len(self._in_work) else None)


class Heartbeat:
    """Tells a core that hangs from one that computes for long; asked now and then while the core says nothing.

    A core whose loop does not turn hangs if its process used no processor for `timeout_s` either (it was stopped, or
    waits for something that does not come), or if it took much longer than its steps should: than any step could, where
    that is not known.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked_at = 0.0
        self._num_turns = 0
        self._cpu_s: float | None = None
        self._longest_s = 0.0
        self.silent_s = 0.0
        self._idle_s = 0.0

    @property
    def stalls(self) -> bool:
        """Whether the core, at the last look, had done nothing for longer than it should take."""
        return self._idle_s > STALL_S

    def hangs(self, now: float, num_turns: int, cpu_s: float | None, expected_s: float | None = None) -> bool:
        """Look: the time, the turns of the loop, the processor time used (None: not known, so it may compute), and how
        long the steps in work should take (None: not known)."""
        elapsed, self._looked_at = min(now - self._looked_at, MAX_LOOK_S), now
        used, self._cpu_s = _difference(cpu_s, self._cpu_s), cpu_s
        if num_turns != self._num_turns:
            if self._num_turns:  # loading is no step
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
    """Processor time that a process has used, with all its threads; None where the system does not say (not Linux)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) * TICK_S


def cpu_seconds_with_children(pid: int) -> float | None:
    """The same with the processes that it has started and that still run, such as the ranks of a core."""
    own = cpu_seconds(pid)
    if own is None:
        return None
    return own + sum(cpu_seconds(child) or 0.0 for child in _children(pid))


def _children(pid: int) -> list[int]:
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it, or a thread of it, has ended meanwhile
        return []
    return [int(child) for children in lists for child in children.split()]
