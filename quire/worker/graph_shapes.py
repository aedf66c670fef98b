"""In which shapes the steps of a device are captured, and the one that a step takes.

A step that only decodes has a row for each request. In any other the tokens of requests stand one behind the other, as
in a step that is not captured, and what is missing to the graph's shape is padding: requests without tokens, then
tokens of no request. So one form serves the verification of drafts, pieces of prompts, and steps that mix them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.config import EngineConfig

MOST_ROWS = 512
"""Of a graph: beyond, a device is busy long enough for Python to launch what follows."""
PROMPT_STEP = 64
"""Between sizes of steps with prompts: so at most so many rows of one are padding."""
FEW_REQUESTS = 8
_VERIFIED_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Requests of a step that verifies drafts; where more run, drafts pay little."""


class GraphShape(NamedTuple):
    """The most that steps of one graph have; with `max_query_len` 1 every request has one token."""

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
    """1, 2, 4, every 8th to 256, every 16th to 512, as far as there are requests, and the most there can be."""
    most = min(max_num_seqs, MOST_ROWS)
    steps = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    return (*(size for size in steps if size < most), most)


def sample_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then two sizes for each power of two, to `most` or 512: a row of logits costs what it costs."""
    steps = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    most = min(most, MOST_ROWS)
    return (*(size for size in steps if size < most), most)


def most_samples(config: EngineConfig) -> int:
    """Of a step: one behind each request, and one behind each of its drafts if somebody guesses."""
    settings = config.speculative.settings
    return config.scheduler.max_num_seqs * (1 + (settings.most_drafts if settings.method is not None else 0))


def shapes_of(config: EngineConfig) -> tuple[GraphShape, ...]:
    """Those that are asked for and can occur."""
    if config.device.enforce_eager:
        return ()
    found = {GraphShape.decode(size) for size in decode_sizes(config)}
    if config.pooling is None:
        found |= {*_of_drafts(config), *_of_prompts(config)}
    return tuple(sorted(found, key=lambda shape: (shape.num_tokens, shape)))


def decode_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Batch sizes of steps that only decode."""
    most = config.scheduler.max_num_seqs
    asked = config.device.cudagraph_capture_sizes or default_sizes(most)
    return tuple(size for size in asked if size <= most)


def _of_drafts(config: EngineConfig) -> Iterator[GraphShape]:
    """So many requests with so many drafts each, if somebody guesses."""
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


def _of_prompts(config: EngineConfig) -> Iterator[GraphShape]:
    """Of each size two: for few requests, and for as many as there can be."""
    asked = config.device.prefill_graph_sizes or tuple(range(PROMPT_STEP, MOST_ROWS + 1, PROMPT_STEP))
    most = config.scheduler.max_num_seqs
    for size in asked:
        if 0 < size <= config.scheduler.max_num_batched_tokens:
            yield from (GraphShape(min(most, size, n), size, size) for n in (FEW_REQUESTS, size) if size > 1)


class ShapeTable:
    """The shapes that there are graphs of."""

    def __init__(self, shapes: Iterable[GraphShape]) -> None:
        self._shapes = sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_requests, shape))

    def fitting(self, num_requests: int, num_tokens: int, max_query_len: int) -> GraphShape | None:
        """The one with the fewest tokens, and then requests, that holds such a step; None: none does.

        A step that only decodes takes none but its own kind: attention of it costs less.
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
