# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of forward passes and of sampling, and the shapes they are captured in.

A step takes the smallest graph that holds it; the rest is padding. Pure decode steps have one row per request. All
other steps are flat; padding is requests without tokens, then tokens of no request. So one form serves draft
verification, chunked prefill and mixed steps.

Invariant: graph inputs and outputs keep their addresses. All graphs of a model share one memory pool and are captured
largest first, so that smaller ones reuse its memory. Output is valid until the next replay of a graph of its kind.
Graphs are captured on padding, so the pass that compiles kernels changes no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from quire.config import EngineConfig
from quire.kernels.triton.launch import next_power_of_2

logger = logging.getLogger(__name__)

MOST_ROWS = 512  # largest graph; longer steps keep the device busy while Python launches the next kernels
PROMPT_STEP = 64  # distance between sizes of prefill graphs, and so the most rows of padding
FEW_REQUESTS = 8
_VERIFIED_ROWS = (1, 2, 4, 8, 16, 32, 64)  # requests of a verification step; with more, drafts gain little


class GraphShape(NamedTuple):
    """Limits of the steps that a graph holds; `max_query_len` 1 means one token per request."""

    num_requests: int
    num_tokens: int
    max_query_len: int

    @property
    def is_decode(self) -> bool:
        return self.max_query_len == 1

    @classmethod
    def decode(cls, size: int) -> GraphShape:
        return cls(size, size, 1)


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return 1, 2, 4, multiples of 8 to 256, multiples of 16 to 512, and the largest batch, up to `max_num_seqs`."""
    most = min(max_num_seqs, MOST_ROWS)
    steps = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    return (*(size for size in steps if size < most), most)


def sample_sizes(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, then two sizes per power of two, to `most` or 512; padding costs whole rows of logits."""
    steps = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    most = min(most, MOST_ROWS)
    return (*(size for size in steps if size < most), most)


def most_samples(config: EngineConfig) -> int:
    """Return the most samples of a step: one per request plus its drafts."""
    settings = config.speculative.settings
    return config.scheduler.max_num_seqs * (1 + (settings.most_drafts if settings.method is not None else 0))


def shapes_of(config: EngineConfig) -> tuple[GraphShape, ...]:
    """Return the configured shapes that can occur."""
    if config.device.enforce_eager:
        return ()
    found = {GraphShape.decode(size) for size in decode_sizes(config)}
    if config.pooling is None:
        found |= {*_verification_shapes(config), *_prefill_shapes(config)}
    return tuple(sorted(found, key=lambda shape: (shape.num_tokens, shape)))


def decode_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Return the batch sizes of pure decode graphs."""
    most = config.scheduler.max_num_seqs
    asked = config.device.cudagraph_capture_sizes or default_sizes(most)
    return tuple(size for size in asked if size <= most)


def _verification_shapes(config: EngineConfig) -> Iterator[GraphShape]:
    """Yield shapes of draft verification: requests x drafts each."""
    settings, limits = config.speculative.settings, config.scheduler
    if settings.method is None:
        return
    drafts = [
        2**power for power in range(settings.most_drafts.bit_length()) if 2**power < settings.most_drafts
    ]
    for count in (*drafts, settings.most_drafts):
        for rows in config.device.cudagraph_capture_sizes or _VERIFIED_ROWS:
            num_tokens = rows * (1 + count)
            if rows <= limits.max_num_seqs and num_tokens <= min(MOST_ROWS, limits.max_num_batched_tokens):
                yield GraphShape(rows, num_tokens, 1 + count)


def _prefill_shapes(config: EngineConfig) -> Iterator[GraphShape]:
    """Yield two shapes of each size: for few requests, and for the most possible."""
    asked = config.device.prefill_graph_sizes or tuple(range(PROMPT_STEP, MOST_ROWS + 1, PROMPT_STEP))
    most = config.scheduler.max_num_seqs
    for size in asked:
        if 0 < size <= config.scheduler.max_num_batched_tokens:
            yield from (GraphShape(min(most, size, n), size, size) for n in (FEW_REQUESTS, size) if size > 1)


class ShapeTable:
    """Captured shapes, by size."""

    def __init__(self, shapes: Iterable[GraphShape]) -> None:
        self._shapes = sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_requests, shape))

    def fitting(self, num_requests: int, num_tokens: int, max_query_len: int) -> GraphShape | None:
        """Return the shape with the fewest tokens, then requests, that holds the step; None: none does.

        Pure decode steps and decode shapes only match each other, because their attention is cheaper.
        """
        is_decode = num_requests == num_tokens
        for shape in self._shapes:
            if (
                shape.is_decode == is_decode
                and num_requests <= shape.num_requests
                and num_tokens <= shape.num_tokens
                and max_query_len <= shape.max_query_len
            ):
                return shape
        return None


Key = TypeVar("Key", bound=Hashable)


class CapturingDevice(Protocol):
    """Device that can capture launches."""

    def graph_pool(self) -> Any:
        """Return a memory pool for graphs."""

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
        """Capture the launches of `run` without executing them; return the replay function and the output tensor."""

    def reserved_bytes(self) -> int:
        """Return the device memory held by the process."""


class RowBuffer:
    """Shared output buffer of graphs of one kind, so that each graph does not keep its own.

    Allocated with the first rows, which is never during a capture.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._rows: Tensor | None = None

    def take(self, rows: Tensor) -> Tensor:
        """Copy rows [n, ...] to the first n places, unless they are there; return those places."""
        if self._rows is None:
            self._rows = rows.new_zeros(self.num_rows, *rows.shape[1:])
        place = self.first(len(rows))
        return place if place.data_ptr() == rows.data_ptr() else place.copy_(rows)

    def clear(self) -> None:
        """Zero all rows."""
        if self._rows is not None:
            self._rows.zero_()

    def first(self, count: int) -> Tensor:
        """Return the first places; some rows must have been stored before."""
        assert self._rows is not None, "rows are read before any were stored"
        return self._rows[:count]


class GraphMemory:
    """Memory pool and buffers shared by all graphs of a model.

    Args:
        num_rows: most hidden states that a graph returns or samples from.
        replays: True if steps use graphs; False: they are captured to measure their memory.

    Attributes:
        hidden: output buffer of forward graphs and input buffer of sampling graphs.
    """

    def __init__(self, device: CapturingDevice, num_rows: int, *, replays: bool = True) -> None:
        self.device = device
        self.pool = device.graph_pool()
        self.hidden = RowBuffer(num_rows)
        self.replays = replays
        self._capture: list[Callable[[bool], int]] = []

    def add(self, capture: Callable[[bool], int]) -> None:
        """Register a function that captures the missing graphs, or only the largest, and counts them."""
        self._capture.append(capture)

    def capture_all(self, *, only_largest: bool = False) -> None:
        """Run the registered functions in order."""
        started, before = time.monotonic(), self.device.reserved_bytes()
        count = sum(capture(only_largest) for capture in self._capture)
        taken = (self.device.reserved_bytes() - before) / 2**20
        logger.info("captured %d CUDA graphs in %.2f s, %.0f MiB", count, time.monotonic() - started, taken)


class GraphCache(Generic[Key]):
    """Graphs of one kind, by key.

    Args:
        run: launches the work of a key; returns rows.
        variant: part of a key that decides the kernel variants; one pass compiles them for all its keys.
        kept: output buffer.
    """

    def __init__(
        self,
        room: GraphMemory,
        run: Callable[[Key], Tensor],
        variant: Callable[[Key], Hashable],
        kept: RowBuffer,
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
        """Replay a captured graph; its rows are valid until the next replay of this kind."""
        replay, rows = self._graphs[key]
        replay()
        return rows

    def capture(self, key: Key) -> None:
        """Capture a graph, unless it exists."""
        if key in self._graphs:
            return
        if self._variant(key) not in self._compiled:
            self._launch(key)  # kernels cannot be compiled during capture
            self._compiled.add(self._variant(key))
        self._graphs[key] = self._room.device.capture(lambda: self._launch(key), self._room.pool)

    def _launch(self, key: Key) -> Tensor:
        return self._kept.take(self._run(key))


def row_variant(count: int) -> tuple[int, bool]:
    """Return the part of a number of rows that decides kernel variants.

    Tiles are sized by powers of two, and Triton specializes on multiples of 16.
    """
    return next_power_of_2(count), count % 16 == 0
