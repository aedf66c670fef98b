# SPDX-License-Identifier: Apache-2.0
"""Share of the machine that other programs took while an engine ran.

A program that takes a core for a while makes engines whose threads wait for each other many times slower, so a rate
taken beside one says nothing. Linux only: it reads /proc/stat.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

MAX_SHARE = 0.05
"""Of all processor time. The kernel itself takes about a hundredth."""

_IDLE = ("idle", "iowait")
_FIELDS = ("user", "nice", "system", *_IDLE, "irq", "softirq", "steal")


@dataclass(frozen=True)
class Times:
    """Seconds of processor time since some moment: all there was, what was used, and what this program's used."""

    total: float
    busy: float
    own: float

    def others_share(self, before: Times) -> float:
        """The part of all processor time since `before` that went to others."""
        busy, own = self.busy - before.busy, self.own - before.own
        return max(0.0, busy - own) / (self.total - before.total)


def now() -> Times:
    """Own time counts this process and the children that have ended, each with its own ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total, busy = parse(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
    return Times(total, busy, sum(usage.ru_utime + usage.ru_stime for usage in usages))


def parse(stat: str, ticks_per_s: int) -> tuple[float, float]:
    """Total and busy seconds of all processors, from the first line of /proc/stat; time stolen by a host is busy."""
    ticks = dict(zip(_FIELDS, map(int, stat.splitlines()[0].split()[1:]), strict=False))
    total = sum(ticks.values())
    return total / ticks_per_s, (total - sum(ticks[name] for name in _IDLE)) / ticks_per_s
