"""CUDA graphs: the launches of a forward pass, or of the choice of tokens behind one, replayed by one call.

A graph is captured for some shapes; a step takes the smallest that holds it, and the rest is padding.

Invariant: what a graph reads and writes keeps its address. All graphs of a model share one pool of memory and are
captured largest first, so that the smaller ones live in what the largest needs; and what they give stands in one place,
so it is valid until the next replay of a graph of its kind. A graph is captured on inputs that are padding, for then a
pass that is only to compile kernels changes nothing of a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from quire.kernels.triton.launch import next_power_of_2

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)


class Capturer(Protocol):
    """A device that can record launches."""

    def graph_pool(self) -> Any:
        """Memory that graphs share."""

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
        """Record what `run` launches, without doing it; returns what replays it, and where its result will be."""

    def reserved_bytes(self) -> int:
        """Memory that the process holds on the device."""


class KeptRows:
    """The one place for what graphs of a kind give, so that each of them does not keep a result of its own.

    Made when the first rows come, which is never while something is recorded.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._rows: Tensor | None = None

    def take(self, rows: Tensor) -> Tensor:
        """Put rows [n, ...] into the first n places, unless they stand there; returns these."""
        if self._rows is None:
            self._rows = rows.new_zeros(self.num_rows, *rows.shape[1:])
        place = self.first(len(rows))
        return place if place.data_ptr() == rows.data_ptr() else place.copy_(rows)

    def clear(self) -> None:
        """Make zeros of all rows, if there are any."""
        if self._rows is not None:
            self._rows.zero_()

    def first(self, count: int) -> Tensor:
        """The first places, where some rows were put before."""
        assert self._rows is not None, "rows are read before there are any"
        return self._rows[:count]


class GraphRoom:
    """What all graphs of a model share.

    Args:
        num_rows: most hidden states that a graph gives, or samples are taken behind.
        replays: whether steps use graphs; False: they are made to see what they take.

    Attributes:
        hidden: where graphs of forward passes leave their hidden states, and those of samples read them.
    """

    def __init__(self, device: Capturer, num_rows: int, *, replays: bool = True) -> None:
        self.device = device
        self.pool = device.graph_pool()
        self.hidden = KeptRows(num_rows)
        self.replays = replays
        self._capture: list[Callable[[bool], int]] = []

    def add(self, capture: Callable[[bool], int]) -> None:
        """Somebody has graphs: `capture` makes those that are missing, or only the largest, and counts them."""
        self._capture.append(capture)

    def capture_all(self, *, only_largest: bool = False) -> None:
        """Everybody's, in the order in which they came."""
        started, before = time.monotonic(), self.device.reserved_bytes()
        count = sum(capture(only_largest) for capture in self._capture)
        taken = (self.device.reserved_bytes() - before) / 2**20
        logger.info("captured %d CUDA graphs in %.2f s, %.0f MiB", count, time.monotonic() - started, taken)


class Graphs(Generic[Key]):
    """Graphs of one kind, by key.

    Args:
        run: launches what a key stands for; returns rows.
        variant: what of a key decides which kernels are launched: a pass compiles them, for all keys of a variant.
        kept: where the rows are put.
    """

    def __init__(
        self,
        room: GraphRoom,
        run: Callable[[Key], Tensor],
        variant: Callable[[Key], Hashable],
        kept: KeptRows,
    ) -> None:
        self._room = room
        self._run = run
        self._variant = variant
        self._kept = kept
        self._compiled: set[Hashable] = set()
        self._graphs: dict[Key, tuple[Callable[[], None], Tensor]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, key: Key) -> Tensor:
        """Run a graph that was captured; its rows, until another one of these is replayed."""
        replay, rows = self._graphs[key]
        replay()
        return rows

    def capture(self, key: Key) -> None:
        """Make a graph, unless it is there."""
        if key in self._graphs:
            return
        if self._variant(key) not in self._compiled:
            self._launch(key)  # kernels cannot be compiled while something is recorded
            self._compiled.add(self._variant(key))
        self._graphs[key] = self._room.device.capture(lambda: self._launch(key), self._room.pool)

    def _launch(self, key: Key) -> Tensor:
        return self._kept.take(self._run(key))


def row_variant(count: int) -> tuple[int, bool]:
    """What kernels may make of a number of rows: tiles are sized by powers of two, and Triton compiles apart for
    numbers that are multiples of 16."""
    return next_power_of_2(count), count % 16 == 0
