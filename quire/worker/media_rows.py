# SPDX-License-Identifier: Apache-2.0
"""Media of the batch's rows: embeddings, rotary positions and sight of a step's tokens.

Shapes: T tokens of the step, M of them with an embedding, H hidden size.
Invariant: what a token gets depends on its request and position alone, so chunks and batches change nothing. A request
holds its embeddings until its row is free.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, GroupMetadata
from quire.layers.step import MediaRows, StepContext
from quire.media import EncodeProgress, MediaItem, both_ways
from quire.scheduler.output import NewRequestData

Positions = NDArray[np.int64]
AXES = 3  # frame, row and column


class Embeddings(NamedTuple):
    """Embeddings of one item in the order of its positions, on the host."""

    values: Tensor
    """[n, H]."""
    deepstack: tuple[Tensor, ...] = ()
    """[n, H] each, added behind the first layers."""


class EmbeddingSource(Protocol):
    """Store of the embeddings that the worker has."""

    def embeddings(self, digest: bytes) -> Embeddings | None:
        """Return an item's embeddings; None: the store has none."""


class MediaEncoder(EmbeddingSource, Protocol):
    """Encoder of images and other media, with the store of its embeddings."""

    def encode(self, items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
        """Compute slices of the items in order until all are done or the budget is used, at least one slice.

        An item that cannot be encoded costs itself and is named with the reason.
        """

    def drop(self, digests: Sequence[bytes]) -> None:
        """Drop embeddings, and work on items that is not done; unknown digests are ignored."""


class StepTokens(Protocol):
    """Tokens of a step; see `quire.worker.inputs.StepLayout`."""

    @property
    def rows(self) -> Positions:
        """[R] batch row of each request."""

    @property
    def starts(self) -> Positions:
        """[R] position of each request's first token."""

    @property
    def ends(self) -> Positions:
        """[R] position after each request's last token."""

    @property
    def query_start_loc(self) -> Positions:
        """[R + 1] index of each request's first token in the step, and T."""


class StepMedia(NamedTuple):
    """Additions of media to a step."""

    rows: MediaRows | None
    rope_positions: Tensor | None
    """[3, T] int64, see `StepContext`."""
    last_seen: Tensor | None
    """[T] int32, see `AttentionMetadata`."""
    encoded_lens: Tensor | None
    """[R] int32, see `StepContext`."""
    encoded_rows: Tensor | None = None
    """[T] int64, see `StepContext`."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> StepMedia:
        """Return the same with tensors that `move` returns."""
        rows = self.rows
        if rows is not None:
            rows = MediaRows(move(rows.rows), move(rows.values), tuple(map(move, rows.deepstack)))
        others = (None if each is None else move(each) for each in self[1:])
        return StepMedia(rows, *others)

    def added_to(self, step: StepContext) -> StepContext:
        """Return the step's context with these additions."""

        def seeing(own: GroupMetadata) -> GroupMetadata:
            return replace(own, last_seen=self.last_seen) if isinstance(own, AttentionMetadata) else own

        groups = tuple(map(seeing, step.groups))
        return replace(
            step,
            groups=groups,
            media=self.rows,
            rope_positions=self.rope_positions,
            encoded_lens=self.encoded_lens,
            encoded_rows=self.encoded_rows,
        )


def rope_positions(
    num_tokens: int, media: Sequence[MediaItem], tokens_per_second: float = 1.0
) -> tuple[Positions, int]:
    """Return [3, num_tokens] frame, row and column of a prompt's tokens, and what later positions add to their own.

    Text counts on all three. The embeddings of an item with a grid count each on its own from the position of its first
    one on, and what follows goes on after the longer side of the grid. An item with several runs has a frame in each.
    """
    found: Positions = np.zeros((AXES, num_tokens), dtype=np.int64)
    done = after = 0
    for item in media:
        if item.grid == (0, 0, 0):
            continue
        frames, rows, columns = item.grid
        each = frames if len(item.runs) == 1 else 1
        interval = np.float32(item.seconds_per_frame) * np.float32(
            tokens_per_second if item.kind == "video" else 0
        )
        of_frames = (np.arange(each, dtype=np.float32) * (interval or np.float32(1))).astype(np.int64)
        places = np.meshgrid(of_frames, np.arange(rows), np.arange(columns), indexing="ij")
        for first, last in item.runs:
            found[:, done:first] = after + np.arange(first - done)
            after += first - done
            found[:, first:last] = after + np.stack(places).reshape(AXES, -1)
            after, done = after + max(rows, columns), last
    found[:, done:] = after + np.arange(num_tokens - done)
    return found, after - done


class _RowMedia(NamedTuple):
    """Media of one request."""

    items: list[MediaItem]
    embeddings: list[Embeddings]
    rope: Positions | None
    """[3, prompt tokens]; None: a token has one position."""

    @property
    def end(self) -> int:
        """Position from which on no media matter."""
        prefix = self.items[0].prefix
        return self.items[-1].end if prefix is None else prefix.length


class MediaBatch:
    """Media of all rows.

    Args:
        source: embeddings of every item of a request that is added; None: another stage puts them in.
        max_num_seqs: rows.
        hidden_size: of the stream.
        num_deepstack: tensors beside the values that each item must have.
        has_axes: tokens are rotated by frame, row and column.
        max_position: positions that can be rotated.
        tokens_per_second: positions per second of a video.
        encodes: the first item of a request is an encoder's output, and later tokens count from 0.
        encodes_any_length: its length differs from request to request, so steps of tokens need it, too.
    """

    def __init__(
        self,
        source: EmbeddingSource | None,
        max_num_seqs: int,
        *,
        hidden_size: int,
        num_deepstack: int = 0,
        has_axes: bool = False,
        max_position: int,
        tokens_per_second: float = 1.0,
        encodes: bool = False,
        encodes_any_length: bool = False,
    ) -> None:
        self._source = source
        self._hidden_size = hidden_size
        self._num_deepstack = num_deepstack
        self._has_axes = has_axes
        self._max_position = max_position
        self._tokens_per_second = tokens_per_second
        self._rows: dict[int, _RowMedia] = {}
        self.deltas: Positions = np.zeros(max_num_seqs, dtype=np.int64)
        """[S] rotary position minus position in the cache, of a row's tokens behind its media."""
        self._encodes_any_length = encodes_any_length
        self._encoded_lens = np.zeros(max_num_seqs, dtype=np.int32) if encodes else None

    def why_unusable(self, request: NewRequestData) -> str | None:
        """Return why the media of a request cannot be used, or None.

        The front end and the core check them; this costs a request what would else be a bug's cost for all.
        """
        done = 0
        for item in request.media:
            reason = self._why_item(item, done, request.num_prompt_tokens)
            if reason is not None:
                return reason
            done = item.end
        prefix = request.media[0].prefix if request.media else None
        if prefix is not None and not done <= prefix.length <= request.num_prompt_tokens:
            return f"a prefix of {prefix.length} tokens does not fit the prompt"
        if self._has_axes and request.media:
            most = int(self._rope_of(request)[0].max()) + 1
            if most > self._max_position:
                return f"its media reach position {most}, the limit is {self._max_position}"
        return None

    def _why_item(self, item: MediaItem, done: int, num_prompt_tokens: int) -> str | None:
        bounds = [item.start, *(edge for run in item.runs for edge in run), item.end]
        if not done <= item.start < item.end <= num_prompt_tokens or bounds != sorted(bounds):
            return f"an item at [{item.start}, {item.end}) with runs {item.runs} does not fit the prompt"
        size = int(np.prod(item.grid))
        if size not in (0, item.num_embeddings):
            return f"an item has {item.num_embeddings} embeddings for a grid of {item.grid}"
        if self._source is None:
            return None
        found = self._source.embeddings(item.digest)
        if found is None:
            return f"the worker has no embeddings of the item at [{item.start}, {item.end})"
        want = (item.num_embeddings, self._hidden_size)
        if any(tuple(each.shape) != want for each in (found.values, *found.deepstack)):
            return f"an item has embeddings {list(found.values.shape)} for {list(want)} positions and sizes"
        if found.deepstack and len(found.deepstack) != self._num_deepstack:
            return f"an item has features for {len(found.deepstack)} layers; the model adds {self._num_deepstack}"
        return None

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the media of a request that was given a row; `why_unusable` returned None."""
        self.deltas[row] = 0
        if not request.media:
            return
        source = self._source
        found = [] if source is None else [source.embeddings(item.digest) for item in request.media]
        rope = None
        if self._has_axes:
            rope, self.deltas[row] = self._rope_of(request)
        if self._encoded_lens is not None:
            self.deltas[row], self._encoded_lens[row] = -request.media[0].end, request.media[0].num_embeddings
        self._rows[row] = _RowMedia(request.media, [each for each in found if each is not None], rope)

    def _rope_of(self, request: NewRequestData) -> tuple[Positions, int]:
        return rope_positions(request.num_prompt_tokens, request.media, self._tokens_per_second)

    def remove_request(self, row: int) -> None:
        """Drop the media of a row."""
        self.deltas[row] = 0
        if self._encoded_lens is not None:
            self._encoded_lens[row] = 0
        self._rows.pop(row, None)

    def are_in(self, layout: StepTokens) -> bool:
        """Return whether media determine anything of a step; if not, it is as without them but for the deltas."""
        return self._encodes_any_length or any(
            start < self._rows[row].end
            for row, start in zip(layout.rows.tolist(), layout.starts.tolist(), strict=True)
            if row in self._rows
        )

    def gather(self, layout: StepTokens) -> StepMedia | None:
        """Return what media add to a step, on the host; None: nothing."""
        if not self._rows or not self.are_in(layout):
            return None
        lens = None if self._encoded_lens is None else torch.from_numpy(self._encoded_lens[layout.rows])
        seen = self._last_seen(layout)
        return StepMedia(self._media_rows(layout), self._rope(layout), seen, lens, self._encoded_rows(layout))

    def _encoded_rows(self, layout: StepTokens) -> Tensor | None:
        """Return the request of each token, unless some are no decoders' tokens or all outputs have one length."""
        ends = (self._rows[row].end if row in self._rows else 0 for row in layout.rows.tolist())
        if not self._encodes_any_length or any(map(operator.lt, layout.starts.tolist(), ends)):
            return None
        return torch.from_numpy(np.arange(len(layout.rows)).repeat(layout.ends - layout.starts))

    def _media_rows(self, layout: StepTokens) -> MediaRows | None:
        """Return the embeddings of a step's tokens; values of items without DeepStack count as 0 there."""
        rows: list[Positions] = []
        parts: list[tuple[Embeddings, slice]] = []
        for row, start, end, at in _requests(layout):
            own = self._rows.get(row)
            if own is None or self._source is None:
                continue
            for item, embeddings in zip(own.items, own.embeddings, strict=True):
                for first, last, place in _overlaps(item, start, end):
                    rows.append(np.arange(first, last) + (at - start))
                    parts.append((embeddings, slice(place, place + last - first)))
        if not rows:
            return None
        return MediaRows(
            torch.from_numpy(np.concatenate(rows)),
            torch.cat([one.values[part] for one, part in parts]),
            self._deepstack(parts),
        )

    def _deepstack(self, parts: list[tuple[Embeddings, slice]]) -> tuple[Tensor, ...]:
        if not any(one.deepstack for one, _ in parts):
            return ()

        def of_layer(layer: int) -> Tensor:
            values = (
                one.deepstack[layer][part] if one.deepstack else torch.zeros_like(one.values[part])
                for one, part in parts
            )
            return torch.cat(list(values))

        return tuple(map(of_layer, range(self._num_deepstack)))

    def _rope(self, layout: StepTokens) -> Tensor | None:
        if not self._has_axes:
            return None
        found: Positions = np.empty((AXES, int(layout.query_start_loc[-1])), dtype=np.int64)
        for row, start, end, at in _requests(layout):
            found[:, at : at + end - start] = np.arange(start, end) + self.deltas[row]
            own = self._rows.get(row)
            if own is not None and own.rope is not None and start < own.rope.shape[1]:
                known = own.rope[:, start:end]
                found[:, at : at + known.shape[1]] = known
        return torch.from_numpy(found)

    def _last_seen(self, layout: StepTokens) -> Tensor | None:
        """Return what rows see if some see more than the positions up to their own."""
        found: NDArray[np.int32] = np.empty(int(layout.query_start_loc[-1]), dtype=np.int32)
        sees_ahead = False
        for row, start, end, at in _requests(layout):
            found[at : at + end - start] = np.arange(start, end)
            own = self._rows.get(row)
            for first, last in both_ways([] if own is None else own.items):
                first, last = max(first, start), min(last, end)
                if first < last:
                    found[at + first - start : at + last - start] = last - 1
                    sees_ahead = True
        return torch.from_numpy(found) if sees_ahead else None


def _requests(layout: StepTokens) -> zip[tuple[int, int, int, int]]:
    """Return (row, first position, end, index of the first token) of each request of a step."""
    bounds = (layout.rows, layout.starts, layout.ends, layout.query_start_loc[:-1])
    return zip(*(each.tolist() for each in bounds), strict=True)


def _overlaps(item: MediaItem, start: int, end: int) -> list[tuple[int, int, int]]:
    """Return (first position, end, index of the first embedding) of an item's runs within [start, end)."""
    found, place = [], 0
    for first, last in item.runs:
        begin, stop = max(first, start), min(last, end)
        if begin < stop:
            found.append((begin, stop, place + begin - first))
        place += last - first
    return found
