"""CUDA graphs of decode steps: the launches of a whole forward pass, replayed by one call.

A graph is captured for some batch sizes; a step takes the smallest that holds it, and the rest is padding. Where
adapters are served there are two of each size: one adds what rows have of them, and steps without any are spared that.

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
        run: launches a forward pass over so many requests with a token each, some with adapters or none; returns the
            hidden states.
        adapts: whether steps may have adapters.
    """

    def __init__(
        self,
        sizes: Iterable[int],
        run: Callable[[int, bool], Tensor],
        device: Capturer,
        *,
        adapts: bool = False,
    ) -> None:
        self._sizes = sorted(set(sizes))
        self._run = run
        self._device = device
        self._pool = device.graph_pool()
        self._variants = (False, True) if adapts else (False,)
        self._graphs: dict[tuple[int, bool], tuple[Callable[[], None], Tensor]] = {}

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    @property
    def captured(self) -> tuple[int, ...]:
        """Sizes that have a graph without adapters, in the order in which they got it."""
        return tuple(size for size, adapts in self._graphs if not adapts)

    def size_for(self, num_requests: int) -> int:
        """The smallest size that holds so many requests; 0: none does."""
        index = bisect_left(self._sizes, num_requests)
        return self._sizes[index] if index < len(self._sizes) else 0

    def capture_all(self) -> None:
        """Capture what is missing, the largest first."""
        started, before = time.monotonic(), self._device.reserved_bytes()
        for size in reversed(self._sizes):
            for adapts in self._variants:
                self._capture(size, adapts)
        taken = (self._device.reserved_bytes() - before) / 2**20
        duration = time.monotonic() - started
        logger.info("captured %d CUDA graphs in %.2f s, %.0f MiB", len(self._graphs), duration, taken)

    def replay(self, size: int, adapts: bool = False) -> Tensor:
        """Run the graph of a size, captured now if it is not yet; its hidden states, until the next replay."""
        replay, hidden = self._capture(size, adapts)
        replay()
        return hidden

    def _capture(self, size: int, adapts: bool) -> tuple[Callable[[], None], Tensor]:
        kind = size, adapts
        if kind not in self._graphs:
            self._run(size, adapts)  # compiles kernels, which cannot be done while recording
            self._graphs[kind] = self._device.capture(lambda: self._run(size, adapts), self._pool)
        return self._graphs[kind]
