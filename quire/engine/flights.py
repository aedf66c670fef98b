"""`Flights`: which requests are on their way, on which core, under which names, and until when.

Invariant: a request takes off once, lands once, and is counted on its core in between.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quire.engine.core_ids import CoreIds


@dataclass(frozen=True)
class Flight:
    """A request on its way: what its caller calls it, which core has it, and under which names."""

    label: str
    core: int
    core_ids: list[str]


class Flights:
    """The requests of one front end.

    Args:
        num_cores: among which they are divided.
        front_end: its number, of which the names are made.
    """

    def __init__(self, num_cores: int, front_end: int) -> None:
        self._num_sequences = [0] * num_cores
        self._core_ids = CoreIds(front_end)
        self._by_name: dict[str, Flight] = {}
        self._names: dict[str, str] = {}  # of the requests, by core id
        self._deadlines: list[tuple[float, str]] = []

    # A request's way

    def new_name(self, label: str) -> str:
        """One that no other request has."""
        return self._core_ids.new(label)

    def take_off(self, name: str, flight: Flight, deadline: float | None = None) -> None:
        """A request is handed to its core, and is to end at `deadline`, by the engine's clock, at the latest."""
        self._by_name[name] = flight
        self._names.update(dict.fromkeys(flight.core_ids, name))
        self._core_ids.add(flight.label, flight.core_ids)
        self._num_sequences[flight.core] += len(flight.core_ids)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, name))

    def move(self, name: str, core: int) -> None:
        """A request goes on on another core."""
        flight = self._by_name[name]
        self._num_sequences[flight.core] -= len(flight.core_ids)
        self._num_sequences[core] += len(flight.core_ids)
        self._by_name[name] = replace(flight, core=core)

    def land(self, name: str) -> None:
        """A request has ended."""
        flight = self._by_name.pop(name)
        for core_id in flight.core_ids:
            del self._names[core_id]
        self._core_ids.end(flight.label, flight.core_ids)
        self._num_sequences[flight.core] -= len(flight.core_ids)

    # Labels

    def __contains__(self, label: str) -> bool:
        """Whether a request of this label is on its way."""
        return label in self._core_ids

    def __len__(self) -> int:
        """Labels of those on their way."""
        return len(self._core_ids)

    def labels(self) -> list[str]:
        """Of those on their way, oldest first."""
        return self._core_ids.labels()

    def known(self, label: str) -> list[str]:
        """Core ids of a label's requests on their way, else of its last one that ended."""
        return self._core_ids.known(label)

    def names(self) -> set[str]:
        """Of the requests on their way."""
        return set(self._by_name)

    # Core ids of those on their way

    def labelled(self, labels: str | Iterable[str]) -> list[str]:
        """Of one label or several; unknown ones have none."""
        return self._core_ids.in_flight(labels)

    def named(self, name: str) -> list[str]:
        """Of one request; none once it has ended."""
        return self._by_name[name].core_ids if name in self._by_name else []

    def on(self, core: int) -> dict[str, list[str]]:
        """Of each request of a core, by the request's name."""
        return {name: flight.core_ids for name, flight in self._by_name.items() if flight.core == core}

    def num_on(self, core: int) -> int:
        """Sequences of a core."""
        return self._num_sequences[core]

    def by_core(self, core_ids: Sequence[str]) -> dict[int, list[str]]:
        """These, by who has them."""
        found: dict[int, list[str]] = {}
        for core_id in core_ids:
            found.setdefault(self._by_name[self._names[core_id]].core, []).append(core_id)
        return found

    # Deadlines

    @property
    def next_deadline(self) -> float | None:
        """The first of those on their way; None if none has one."""
        while self._deadlines and self._deadlines[0][1] not in self._by_name:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def take_due(self, now: float) -> Iterator[list[str]]:
        """Core ids of each request whose deadline has come; each request once."""
        while (deadline := self.next_deadline) is not None and deadline <= now:
            _, name = heapq.heappop(self._deadlines)
            yield self._by_name[name].core_ids
