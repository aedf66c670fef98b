# SPDX-License-Identifier: Apache-2.0
"""In-flight requests of one front end: labels, core ids, cores, deadlines.

Invariant: no core id is given twice by any front end of a core, so a late message about a finished request is never
attributed to the next request of the same label, and each message finds its front end. A request is added once,
removed once, and counted on its core in between.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quire.engine.messages import numbers_of
from quire.scheduler.wait_account import NUM_REMEMBERED


class CoreIds:
    """Label (the caller's request id) -> core ids of its sequences; several requests may share a label.

    Finished labels are remembered for as long as the core can explain their requests.

    Args:
        front_end: number of this front end; ids of different front ends, concurrent or successive, are disjoint.
    """

    def __init__(self, front_end: int = 0) -> None:
        self._numbers = numbers_of(front_end)
        self._in_flight: dict[str, list[str]] = {}
        self._ended: OrderedDict[str, list[str]] = OrderedDict()

    def __contains__(self, label: str) -> bool:
        return label in self._in_flight

    def __len__(self) -> int:
        """Return the number of labels in flight."""
        return len(self._in_flight)

    def labels(self) -> list[str]:
        """Return the labels in flight, oldest first."""
        return list(self._in_flight)

    def new(self, label: str) -> str:
        """Return a unique name for a request, from which the ids of its sequences are derived."""
        return f"{label}-{next(self._numbers):x}"

    def add(self, label: str, core_ids: Iterable[str]) -> None:
        """Record that sequences of this label are in flight."""
        self._in_flight.setdefault(label, []).extend(core_ids)

    def in_flight(self, labels: str | Iterable[str]) -> list[str]:
        """Return core ids of all sequences of one label or several; unknown labels have none."""
        labels = [labels] if isinstance(labels, str) else labels
        return [core_id for label in labels for core_id in self._in_flight.get(label, ())]

    def known(self, label: str) -> list[str]:
        """Return core ids in flight, else those of the label's last finished request, if it is remembered."""
        return self.in_flight(label) or self._ended.get(label, [])

    def finish(self, label: str, core_ids: Iterable[str]) -> None:
        """Record that these sequences of a label have finished."""
        ended = list(core_ids)
        left = [core_id for core_id in self._in_flight.pop(label, ()) if core_id not in ended]
        if left:
            self._in_flight[label] = left
        self._ended[label] = ended
        self._ended.move_to_end(label)
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)


@dataclass(frozen=True)
class CallerRequest:
    """Request in flight: caller's label, core index, core ids of its sequences."""

    label: str
    core: int
    core_ids: list[str]


class InFlightRequests:
    """In-flight requests of one front end: label, core, core ids, deadline.

    Args:
        num_cores: cores among which they are distributed.
        front_end: number from which names are derived.
    """

    def __init__(self, num_cores: int, front_end: int) -> None:
        self._num_sequences = [0] * num_cores
        self._core_ids = CoreIds(front_end)
        self._by_name: dict[str, CallerRequest] = {}
        self._names: dict[str, str] = {}  # of the requests, by core id
        self._deadlines: list[tuple[float, str]] = []

    # Lifecycle

    def new_name(self, label: str) -> str:
        """Return a name that no other request has."""
        return self._core_ids.new(label)

    def add(self, name: str, request: CallerRequest, deadline: float | None = None) -> None:
        """Add a request that is sent to its core and must finish by `deadline` on the engine's clock."""
        self._by_name[name] = request
        self._names.update(dict.fromkeys(request.core_ids, name))
        self._core_ids.add(request.label, request.core_ids)
        self._num_sequences[request.core] += len(request.core_ids)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, name))

    def move(self, name: str, core: int) -> None:
        """Move a request to another core."""
        request = self._by_name[name]
        self._num_sequences[request.core] -= len(request.core_ids)
        self._num_sequences[core] += len(request.core_ids)
        self._by_name[name] = replace(request, core=core)

    def remove(self, name: str) -> None:
        """Remove a finished request."""
        request = self._by_name.pop(name)
        for core_id in request.core_ids:
            del self._names[core_id]
        self._core_ids.finish(request.label, request.core_ids)
        self._num_sequences[request.core] -= len(request.core_ids)

    # Labels

    def __contains__(self, label: str) -> bool:
        """Return whether a request of this label is in flight."""
        return label in self._core_ids

    def __len__(self) -> int:
        """Return the number of labels in flight."""
        return len(self._core_ids)

    def labels(self) -> list[str]:
        """Return the labels in flight, oldest first."""
        return self._core_ids.labels()

    def known(self, label: str) -> list[str]:
        """Return core ids of a label's requests in flight, else of its last finished one."""
        return self._core_ids.known(label)

    def names(self) -> set[str]:
        """Return the names of the requests in flight."""
        return set(self._by_name)

    # Core ids in flight

    def labeled(self, labels: str | Iterable[str]) -> list[str]:
        """Return core ids of one label or several; unknown labels have none."""
        return self._core_ids.in_flight(labels)

    def named(self, name: str) -> list[str]:
        """Return core ids of one request; none once it has finished."""
        return self._by_name[name].core_ids if name in self._by_name else []

    def on(self, core: int) -> dict[str, list[str]]:
        """Return request name -> core ids, for the requests of a core."""
        return {name: request.core_ids for name, request in self._by_name.items() if request.core == core}

    def num_on(self, core: int) -> int:
        """Return the number of sequences on a core."""
        return self._num_sequences[core]

    def by_core(self, core_ids: Sequence[str]) -> dict[int, list[str]]:
        """Group core ids by owning core."""
        found: dict[int, list[str]] = {}
        for core_id in core_ids:
            found.setdefault(self._by_name[self._names[core_id]].core, []).append(core_id)
        return found

    # Deadlines

    @property
    def next_deadline(self) -> float | None:
        """Earliest deadline in flight; None if no request has one."""
        while self._deadlines and self._deadlines[0][1] not in self._by_name:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def pop_due(self, now: float) -> Iterator[list[str]]:
        """Yield the core ids of each request whose deadline has passed; each request once."""
        while (deadline := self.next_deadline) is not None and deadline <= now:
            _, name = heapq.heappop(self._deadlines)
            yield self._by_name[name].core_ids
