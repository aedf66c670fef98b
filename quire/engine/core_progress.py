# SPDX-License-Identifier: Apache-2.0
"""Progress of a core process: shared memory that outlives the core.

Invariant: the core writes, its parent reads, and neither waits for the other. Requests are written before work on them
begins, so they are known however the core ended.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
import time
from collections.abc import Iterable, Set
from pathlib import Path
from typing import NamedTuple

from quire.scheduler.output import SchedulerOutput

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


class ProgressFile:
    """File of words: loop iterations, number of requests in work, expected duration of the steps in work, stage of
    loading, and a digest of each request's id.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._rows: dict[str, bytes] = {}

    @staticmethod
    def create(path: Path, max_num_rows: int) -> ProgressFile:
        """Create the file; raises OSError if there is no room. Later writes need none."""
        path.write_bytes(bytes(_ROWS + max_num_rows * _WORD.size))
        return ProgressFile(path)

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
