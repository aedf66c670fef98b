# SPDX-License-Identifier: Apache-2.0
"""From raw results to figures: medians, and quire's ratios to its peers.

Invariant: a figure is a median over the rounds of one session, and a ratio is one of two such medians.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.compare.cases import CASES
from benchmarks.compare.engines.base import Engine
from benchmarks.compare.goals import FILES, Goal, file_goal, goal
from benchmarks.compare.records import Record

OWN, OWN_FILES, BESIDE_PROBE = "quire", "quire, files", "beside probe"
_FULL_PRECISION = 16
"""Peers without a 16-bit or smaller type of their own are compared with quire's 16-bit weights by their best type."""

Medians = Mapping[tuple[str, str, str], float]
"""(engine, precision, case) -> rate per second."""


def medians(results: Iterable[Record]) -> Medians:
    """The median of all rounds, without rates that other programs disturbed."""
    rates: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for record in results:
        if record.rate is not None and not record.disturbed:
            rates[record.engine, record.precision, record.case].append(record.rate)
    return {key: statistics.median(values) for key, values in rates.items()}


@dataclass(frozen=True)
class Ratio:
    """Speed of quire divided by that of a peer, in one case."""

    peer: str
    peer_precision: str
    precision: str
    case: str
    ratio: float
    goal: Goal | None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        return None if self.goal is None else self.ratio >= self.goal.ratio


def ratios(rates: Medians, engines: Mapping[str, Engine], shape: str) -> Iterator[Ratio]:
    """quire against every peer at the same bits; a peer that has only 16 bits and more counts with its best type.

    `shape` is that of the checkpoint, which has goals of its own.
    """
    own = engines[OWN]
    for name, peer in engines.items():
        for precision, bits in own.precisions.items():
            rivals = _rivals(peer, bits)
            for case in CASES if name not in (OWN, OWN_FILES) else ():
                measured = {p: rates[name, p, case] for p in rivals if (name, p, case) in rates}
                if measured and (OWN, precision, case) in rates:
                    best = max(measured, key=lambda p: measured[p])
                    ratio = rates[OWN, precision, case] / measured[best]
                    yield Ratio(name, best, precision, case, ratio, goal(shape, name, case, bits))
    yield from _file_ratios(rates)


def _file_ratios(rates: Medians) -> Iterator[Ratio]:
    """quire serving files that are quantized already, against who does the same."""
    for precision, (peer, its_precision) in FILES.items():
        for case in CASES:
            own, its = rates.get((OWN_FILES, precision, case)), rates.get((peer, its_precision, case))
            if own is not None and its is not None:
                yield Ratio(peer, its_precision, precision, case, own / its, file_goal(precision, case))


def _rivals(peer: Engine, bits: int) -> list[str]:
    """The peer's weight formats that weights of so many bits are compared with."""
    same = [precision for precision, its_bits in peer.precisions.items() if its_bits == bits]
    wide = [precision for precision, its_bits in peer.precisions.items() if its_bits > bits]
    return [*same, *wide] if bits == _FULL_PRECISION else same


def probe_shares(rates: Medians) -> dict[str, float]:
    """Weight format -> what decoding one request reads of weights, as a share of what probes read beside it."""
    return {precision: rate for (engine, precision, _), rate in rates.items() if engine == BESIDE_PROBE}
