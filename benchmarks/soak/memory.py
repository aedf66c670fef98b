# SPDX-License-Identifier: Apache-2.0
"""Growth of a process's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = 4096
MB = 1e6
LEAST_SAMPLES = 8


def rss_bytes(pid: int) -> int | None:
    """Memory of a process that is in RAM; None if there is no such process, or it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES or None
    except OSError:
        return None


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares: what y gains per unit of x; 0 for fewer than two points."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


@dataclass(frozen=True)
class Growth:
    """Growth of one process after its warm-up."""

    name: str
    mb: float
    mb_per_hour: float
    gained_mb: float

    def __str__(self) -> str:
        rate = f"{self.mb_per_hour:+.0f} MB/hour, {self.gained_mb:+.1f} MB since its warm-up"
        return f"{self.name}: {self.mb:.0f} MB, {rate}"


@dataclass
class MemoryLog:
    """RSS of the processes of a server, of each core by itself; a thread of its own samples them.

    Args:
        pids: name -> the process of that name now, None while there is none.
        warm_up_s: of each process; what it grows by in that time is no leak.
    """

    pids: Callable[[], dict[str, int | None]]
    warm_up_s: float
    every_s: float = 0.5
    _samples: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def begin_anew(self, pid: int | None) -> None:
        """This process has only now done loading."""
        for key in [key for key in self._samples if key[1] == pid]:
            del self._samples[key]

    def growths(self) -> list[Growth]:
        """Return the growth of each process that lived long enough to tell."""
        found: list[Growth] = []
        for (name, pid), samples in self._samples.items():
            settled = [(at, mb) for at, mb in samples if at - samples[0][0] >= self.warm_up_s]
            if len(settled) >= LEAST_SAMPLES:
                rate = slope(settled)
                gained = rate * (settled[-1][0] - settled[0][0])
                found.append(Growth(f"{name} {pid}", settled[-1][1], rate * 3600, gained))
        return found

    def _run(self) -> None:
        while not self._ended.wait(self.every_s):
            for name, pid in self.pids().items():
                size = rss_bytes(pid) if pid is not None else None
                if pid is not None and size is not None:
                    self._samples.setdefault((name, pid), []).append((time.monotonic(), size / MB))
