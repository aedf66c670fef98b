# SPDX-License-Identifier: Apache-2.0
"""Progress of long work: a bar on a terminal, elsewhere a line every few seconds, as the sign that it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

_SECONDS = 5.0
_T = TypeVar("_T")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Count of completed items, written to stderr with their rate and the time that is left.

    Args:
        total: number of items; None: unknown.
        skipped: items that were complete before; they count, but not for the rate.
        per_unit: number of items in a unit, such as 1e9 for bytes that are shown in GB.
        ends: write a line off a terminal for the last item as well, however soon it comes.
        say: writes a line off a terminal.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        total: int | None,
        what: str,
        unit: str,
        *,
        skipped: int = 0,
        per_unit: float = 1,
        ends: bool = True,
        say: Callable[[str], None] = _print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._what, self._unit, self._clock = total, what, unit, clock
        self._per_unit, self._ends, self._say = per_unit, ends, say
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            desc=what,
            unit=unit if per_unit == 1 else "B",
            unit_scale=per_unit != 1,
            initial=skipped,
            leave=False,
            disable=not is_terminal,
        )
        self._skipped = self._done = skipped
        self._started = self._said = clock()

    def update(self, count: int = 1) -> None:
        """Count further items."""
        self._done += count
        self._bar.update(count)
        now = self._clock()
        is_last = self._ends and self._done == self._total
        if self._bar.disable and (now - self._said >= _SECONDS or is_last):
            self._said = now
            self._say(self._line(now - self._started))

    def close(self) -> None:
        """Clear the bar."""
        self._bar.close()

    def _line(self, seconds: float) -> str:
        """Return `What: 3/10 units, 5 s, 0.6 units/s, 12 s left`, without what is unknown."""
        of = "" if self._total is None else f"/{self._shown(self._total)}"
        line = f"{self._what}: {self._shown(self._done)}{of} {self._unit}, {seconds:.0f} s"
        rate = (self._done - self._skipped) / max(seconds, 1e-6)
        if seconds >= 1:
            line += f", {rate / self._per_unit:.3g} {self._unit}/s"
            if self._total is not None and rate > 0 and self._done < self._total:
                line += f", {_duration((self._total - self._done) / rate)} left"
        return line

    def _shown(self, count: int) -> str:
        """Return a count in units."""
        return str(count) if self._per_unit == 1 else f"{count / self._per_unit:.1f}"


def tracked(items: Sequence[_T], what: str, unit: str) -> Iterator[_T]:
    """Yield items and count each when the next is asked for."""
    progress = Progress(len(items), what, unit)
    for item in items:
        yield item
        progress.update()
    progress.close()


def _duration(seconds: float) -> str:
    """Return a time in its two largest units, such as `3 min 20 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
