"""`CoreIds`: the names under which the core knows a caller's requests.

Invariant: no name is given twice, by whichever front end of a core. So a late word of the core about a request that has
ended is never taken for one about the next request of the same label, and each word finds the front end that it is for.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from quire.scheduler.wait_account import NUM_REMEMBERED

NUMBERS = 1 << 32
"""So many requests, or calls, are numbered by one front end; the next one's numbers begin behind them."""


def numbers_of(front_end: int) -> Iterator[int]:
    """The numbers that this front end gives, in order; the first front end's begin at 0."""
    return itertools.count(front_end * NUMBERS)


def front_end_of(number: int) -> int:
    """Whose number it is."""
    return number // NUMBERS


def front_end_of_request(core_request_id: str) -> int:
    """Who asked for a sequence: the number stands at the end of its name, before a fork's index.

    A name that no front end has given counts as the first one's.
    """
    try:
        return front_end_of(int(core_request_id.rpartition("-")[2].partition(".")[0], 16))
    except ValueError:
        return 0


class CoreIds:
    """Label (what the caller calls a request) -> core ids of its sequences; several requests may share a label.

    As many labels are remembered after their end as the core can still explain requests.

    Args:
        front_end: which of its cores' front ends this is; no two have a number in common, also one after the other.
    """

    def __init__(self, front_end: int = 0) -> None:
        self._numbers = numbers_of(front_end)
        self._in_flight: dict[str, list[str]] = {}
        self._ended: OrderedDict[str, list[str]] = OrderedDict()

    def __contains__(self, label: str) -> bool:
        return label in self._in_flight

    def __len__(self) -> int:
        """Labels in flight."""
        return len(self._in_flight)

    def labels(self) -> list[str]:
        """Those in flight, oldest first."""
        return list(self._in_flight)

    def new(self, label: str) -> str:
        """A name for a request, of which its sequences make theirs."""
        return f"{label}-{next(self._numbers):x}"

    def add(self, label: str, core_ids: Iterable[str]) -> None:
        """Sequences of this label are in flight."""
        self._in_flight.setdefault(label, []).extend(core_ids)

    def in_flight(self, labels: str | Iterable[str]) -> list[str]:
        """Core ids of all sequences of one label or several; unknown ones have none."""
        labels = [labels] if isinstance(labels, str) else labels
        return [core_id for label in labels for core_id in self._in_flight.get(label, ())]

    def known(self, label: str) -> list[str]:
        """Core ids in flight, else those of the label's last request that ended, if it is remembered."""
        return self.in_flight(label) or self._ended.get(label, [])

    def end(self, label: str, core_ids: Iterable[str]) -> None:
        """These sequences of a label are over."""
        ended = list(core_ids)
        left = [core_id for core_id in self._in_flight.pop(label, ()) if core_id not in ended]
        if left:
            self._in_flight[label] = left
        self._ended[label] = ended
        self._ended.move_to_end(label)
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)
