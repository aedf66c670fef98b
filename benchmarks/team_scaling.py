# SPDX-License-Identifier: Apache-2.0
"""Balance of the kernels' work over many threads, computed and not measured: `python benchmarks/team_scaling.py`.

For each matrix of a model, before and now: the share of all threads' time that is work, if all are equally fast; and
after the comma, if one of them is half as fast. "Before" is one stretch of units per thread that nobody helps with, and
units of 4 panels of a row, or 2 of several rows. The rules are those of `Units` in csrc/cpu/linear.h and of `Job` in
csrc/cpu/team.cpp; what the memory can give, and what handing over costs (0.3 microseconds a loop), are left out.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PANEL, UNIT_PANELS, UNITS_PER_THREAD, PART_TILES, PIECES = 16, 4, 4, 4, 32
TILE_ROWS = 6
"""Of floats with AVX2."""
SLOW = 2.0
THREADS = (2, 8, 16, 64)


@dataclass(frozen=True)
class Matrix:
    """Packed weights: `halves` are combined, so their panels go in pairs."""

    name: str
    outputs: int
    halves: int = 1

    @property
    def panels(self) -> int:
        return self.halves * ceil_div(self.outputs // self.halves, PANEL)


MODELS = {
    "0.5B": [Matrix("qkv", 1152), Matrix("o, down", 896), Matrix("gate_up", 9728, 2), Matrix("head", 151936)],
    "8B": [Matrix("qkv", 6144), Matrix("o, down", 4096), Matrix("gate_up", 28672, 2), Matrix("head", 128256)],
}


def ceil_div(a: int, b: int) -> int:
    """Rounded up."""
    return -(-a // b)


def units_now(matrix: Matrix, rows: int, threads: int) -> list[float]:
    """Return the cost of each unit, in panels of one tile of rows."""
    tiles, wanted = ceil_div(rows, TILE_ROWS), UNITS_PER_THREAD * threads
    unit = UNIT_PANELS if rows == 1 else 2
    while unit > matrix.halves and not (
        ceil_div(matrix.panels, unit) >= wanted and falls_evenly(ceil_div(matrix.panels, unit), threads)
    ):
        unit //= 2
    columns = ceil_div(matrix.panels, unit)
    parts = max(1, min(tiles // PART_TILES, ceil_div(wanted, columns)))
    return [
        min(unit, matrix.panels - column * unit) * (tiles * (part + 1) // parts - tiles * part // parts)
        for column in range(columns)
        for part in range(parts)
    ]


def falls_evenly(units: int, threads: int) -> bool:
    """Whether at least 19 of 20 threads have a unit in every round."""
    return 20 * units >= 19 * threads * ceil_div(units, threads)


def units_before(matrix: Matrix, rows: int) -> list[float]:
    """The same, once."""
    unit = UNIT_PANELS if rows == 1 else 2
    return [min(unit, matrix.panels - at) * ceil_div(rows, TILE_ROWS) for at in range(0, matrix.panels, unit)]


def shares(count: int, threads: int) -> list[range]:
    """One stretch of indices per thread."""
    size, more = divmod(count, threads)
    starts = [size * i + min(i, more) for i in range(threads + 1)]
    return [range(*pair) for pair in itertools.pairwise(starts)]


def static_end(units: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the time at which the last thread is done, if each does its own share."""
    own = shares(len(units), len(speeds))
    return max(pace * sum(units[i] for i in share) for share, pace in zip(own, speeds, strict=True))


def claimed_end(units: Sequence[float], speeds: Sequence[float]) -> float:
    """The same if whoever is done takes pieces of the others' shares."""
    threads = min(len(speeds), len(units))
    size = max(1, len(units) // (threads * PIECES))
    left = [list(pieces(share, size)) for share in shares(len(units), threads)]
    free = [(0.0, thread) for thread in range(threads)]
    end = 0.0
    while free:
        now, thread = heapq.heappop(free)
        victims = (left[(thread + i) % threads] for i in range(threads))
        piece = next((victim.pop(0) for victim in victims if victim), None)
        if piece is not None:
            heapq.heappush(free, (now + speeds[thread] * sum(units[i] for i in piece), thread))
        end = max(end, now)
    return end


def pieces(share: range, size: int) -> Iterator[range]:
    """Yield the ranges that a thread claims at a time."""
    for at in range(0, len(share), size):
        yield share[at : at + size]


def utilization(matrix: Matrix, rows: int, threads: int, slow: float) -> tuple[float, float]:
    """Before and now: the shortest time that the threads could take, as a share of what they take."""
    paces = [slow, *[1.0] * (threads - 1)]
    power = sum(1 / pace for pace in paces)
    before, now = units_before(matrix, rows), units_now(matrix, rows, threads)
    return (
        sum(before) / power / static_end(before, paces),
        sum(now) / power / claimed_end(now, paces),
    )


def main() -> None:
    """Print the table."""
    print("| matrix | rows | " + " | ".join(f"{threads} threads" for threads in THREADS) + " |")
    print("|---" * (len(THREADS) + 2) + "|")
    for model, matrices in MODELS.items():
        for matrix in matrices:
            for rows in (1, 16, 192):
                cells = []
                for threads in THREADS:
                    even, uneven = (utilization(matrix, rows, threads, slow) for slow in (1.0, SLOW))
                    cells.append(f"{even[0]:.0%} → {even[1]:.0%}, {uneven[0]:.0%} → {uneven[1]:.0%}")
                print(f"| {model} {matrix.name} | {rows} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
