"""CUDA graphs of decode steps: the launches of a whole forward pass, replayed by one call.

A graph is captured for some batch sizes; a step takes the smallest that holds it, and the rest is padding.

Invariant: what a graph reads and writes keeps its address. All graphs share one pool of memory and are captured largest
first, so that the smaller ones live in what the largest needs; hence a graph's output is valid until the next replay.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

logger = logging.getLogger(__name__)


class Capturer(Protocol):
    """A device that can record launches."""

    def graph_pool(self) -> Any:
        """Memory that graphs share."""

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
        """Record what `run` launches, without doing it; returns what replays it, and where its result will be."""

    def reserved_bytes(self) -> int:
        """Memory that the process holds on the device."""


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, every 8th to 256, every 16th to 512, as far as there are requests, and the most there can be."""
    most = min(max_num_seqs, 512)
    steps = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    return (*(size for size in steps if size < most), most)


class DecodeGraphs:
    """Graphs by batch size.

    Args:
        sizes: in which batch sizes to capture.
        run: launches a forward pass over so many requests with a token each; returns the hidden states.
    """

    def __init__(self, sizes: Iterable[int], run: Callable[[int], Tensor], device: Capturer) -> None:
        self._sizes = sorted(set(sizes))
        self._run = run
        self._device = device
        self._pool = device.graph_pool()
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    @property
    def captured(self) -> tuple[int, ...]:
        """Sizes that have a graph, in the order in which they got it."""
        return tuple(self._graphs)

    def size_for(self, num_requests: int) -> int:
        """The smallest size that holds so many requests; 0: none does."""
        index = bisect_left(self._sizes, num_requests)
        return self._sizes[index] if index < len(self._sizes) else 0

    def capture_all(self) -> None:
        """Capture what is missing, the largest first."""
        started, before = time.monotonic(), self._device.reserved_bytes()
        for size in reversed(self._sizes):
            self._capture(size)
        taken = (self._device.reserved_bytes() - before) / 2**20
        duration = time.monotonic() - started
        logger.info("captured %d CUDA graphs in %.2f s, %.0f MiB", len(self._sizes), duration, taken)

    def replay(self, size: int) -> Tensor:
        """Run the graph of a size, captured now if it is not yet; its hidden states, until the next replay."""
        replay, hidden = self._capture(size)
        replay()
        return hidden

    def _capture(self, size: int) -> tuple[Callable[[], None], Tensor]:
        if size not in self._graphs:
            self._run(size)  # compiles kernels, which cannot be done while recording
            self._graphs[size] = self._device.capture(lambda: self._run(size), self._pool)
        return self._graphs[size]
