"""Progress of long work: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

_SECONDS = 5.0
_T = TypeVar("_T")


class Progress:
    """Count of completed items out of `total`, written to stderr."""

    def __init__(self, total: int, what: str, unit: str) -> None:
        self._total, self._what, self._unit = total, what, unit
        self._bar = tqdm(total=total, desc=what, unit=unit, leave=False, disable=not sys.stderr.isatty())
        self._done = 0
        self._started = self._said = time.monotonic()

    def update(self) -> None:
        """Count one more."""
        self._done += 1
        self._bar.update()
        now = time.monotonic()
        if self._bar.disable and (now - self._said >= _SECONDS or self._done == self._total):
            self._said = now
            seconds = now - self._started
            line = f"{self._what}: {self._done}/{self._total} {self._unit}, {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the bar."""
        self._bar.close()


def tracked(items: Sequence[_T], what: str, unit: str) -> Iterator[_T]:
    """Yield items and count each when the next is asked for."""
    progress = Progress(len(items), what, unit)
    for item in items:
        yield item
        progress.update()
    progress.close()
