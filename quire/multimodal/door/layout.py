# SPDX-License-Identifier: Apache-2.0
"""Layout of an item's placeholders, and its expansion in a prompt.

Invariant: a placeholder token of a prompt belongs to an item because the template or the caller put a marker there;
text that spells a marker was encoded as text (`quire.entrypoints.chat.messages`). So tokens and items pair in order,
and another number of them is an error of the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.errors import ValidationError
from quire.media import MediaItem, Prefix

NUMBER = "\0"
"""Stands in the text of an item for its number among those of its kind in the prompt, from 0 on."""


class PlaceholderLayout(msgspec.Struct, frozen=True):
    """Placeholders of one item; fields as in `quire.multimodal.processors.base.Prepared`.

    Args:
        runs: pairs of token and count for each placeholder of `text`.
        num_pixels: of the decoded image, or of all frames that were read of a video.
        seconds: length of a sound.
        size: (width, height) of an image as decoded; zeros for others.
    """

    text: str
    runs: list[list[tuple[str, int]]]
    grid: tuple[int, int, int] = (0, 0, 0)
    both_ways: bool = False
    num_pixels: int = 0
    seconds_per_frame: float = 0.0
    seconds: float = 0.0
    size: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class PreparedItem:
    """Item of a request: its layout and the file with its arrays."""

    digest: bytes
    kind: str
    path: str
    layout: PlaceholderLayout


@dataclass(frozen=True)
class MediaTokens:
    """Tokens of a model's media: see `quire.multimodal.processors.base.Processor`.

    `video_marker` and `video_placeholder` are those of a video, `sound_marker` and `sound_placeholder` those of a
    sound; empty if the model takes none. `prefix_form` is the processor's. `sounds_as_end`: the embeddings of a sound
    take the place of the token that ends a text, since the model has no row for their own.
    """

    marker: str
    placeholder: str
    literals: tuple[str, ...]
    video_marker: str = ""
    video_placeholder: str = ""
    sound_marker: str = ""
    sound_placeholder: str = ""
    prefix_form: tuple[str, str] | None = None
    sounds_as_end: bool = False

    def placeholder_of(self, kind: str) -> str:
        """Return the token that takes the embeddings of an item."""
        others = {"video": self.video_placeholder, "audio": self.sound_placeholder}
        return others.get(kind, self.placeholder)


class Expansion:
    """Expansion of the placeholders of one prompt.

    Args:
        tokens: of the model.
        id_of: id of a token by its name.
        items: in the order of their markers.
        end_id: id of the token that ends a text.

    Raises:
        ValidationError: the tokenizer lacks a token of the layouts.
    """

    def __init__(
        self,
        tokens: MediaTokens,
        id_of: Callable[[str], int | None],
        items: Sequence[PreparedItem],
        end_id: int | None = None,
    ) -> None:
        self._tokens = tokens
        self._items = items
        self._placeholders = list(dict.fromkeys(tokens.placeholder_of(item.kind) for item in items))
        names = {name for item in items for run in item.layout.runs for name, _ in run}
        names.update(self._placeholders)
        names.update(tokens.prefix_form or ())
        found = {name: id_of(name) for name in names}
        missing = sorted(name for name, token_id in found.items() if token_id is None)
        if missing:
            raise ValidationError(
                f"the model's tokenizer has no token {missing[0]!r}, so it takes no such media",
                param="messages",
            )
        self._ids = {name: token_id for name, token_id in found.items() if token_id is not None}
        self._as = {**self._ids}  # Ids in the expanded prompt.
        if tokens.sounds_as_end and tokens.sound_placeholder in self._ids:
            if end_id is None:
                raise ValidationError(
                    "the model's tokenizer names no eos_token, in whose place sounds are, so it takes none",
                    param="messages",
                )
            self._as[tokens.sound_placeholder] = end_id

    def text(self, index: int) -> str:
        """Return the text in place of an item's marker."""
        return self._items[index].layout.text

    def expand(self, token_ids: Sequence[int]) -> tuple[list[int], list[MediaItem]]:
        """Return the token ids with every placeholder in full, and the items with their positions.

        Raises:
            ValidationError: there are more or fewer placeholders than the items have.
        """
        self._check_counts(token_ids)
        form = self._tokens.prefix_form
        if form is None or not self._items:
            return self._expanded(token_ids)
        ids, media = self._expanded(self._in_form(token_ids, *form))
        return ids, [msgspec.structs.replace(media[0], prefix=_prefix_of(ids, media)), *media[1:]]

    def _in_form(self, token_ids: Sequence[int], begin: str, end: str) -> list[int]:
        """Return a prompt with the token `begin` behind its last item, not before its first one, and `end` last."""
        first, last = self._ids[begin], self._ids[end]
        places = {self._ids[name] for name in self._placeholders}
        stop = max(index for index, token_id in enumerate(token_ids) if token_id in places) + 1
        media, text = [*token_ids[:stop]], [*token_ids[stop:]]
        if len(media) > 1 and media[0] == first and media[1] in places:
            del media[0]
        if text[:1] != [first]:
            text.insert(0, first)
        return media + text + ([] if text[-1] == last else [last])

    def _expanded(self, token_ids: Sequence[int]) -> tuple[list[int], list[MediaItem]]:
        ids: list[int] = []
        media: list[MediaItem] = []
        begin = 0
        for item in self._items:
            positions: list[tuple[int, int]] = []
            start = None
            placeholder = self._ids[self._tokens.placeholder_of(item.kind)]
            for run in item.layout.runs:
                place = token_ids.index(placeholder, begin)
                ids += token_ids[begin:place]
                start = len(ids) if start is None else start
                self._add_run(run, item.kind, ids, positions)
                begin = place + 1
            media.append(_media_item(item, start or 0, len(ids), positions))
        ids += token_ids[begin:]
        return ids, media

    def _check_counts(self, token_ids: Sequence[int]) -> None:
        for name in self._placeholders:
            own = [item for item in self._items if self._tokens.placeholder_of(item.kind) == name]
            wanted, found = sum(len(item.layout.runs) for item in own), token_ids.count(self._ids[name])
            if found != wanted:
                raise ValidationError(
                    f"the prompt has {found} placeholders {name!r} and the media need {wanted}",
                    param="messages",
                )

    def _add_run(
        self, run: list[tuple[str, int]], kind: str, ids: list[int], positions: list[tuple[int, int]]
    ) -> None:
        """Append the tokens of a placeholder, and where they take embeddings."""
        for name, count in run:
            if name == self._tokens.placeholder_of(kind):
                positions.append((len(ids), len(ids) + count))
            ids += [self._as[name]] * count


def _prefix_of(ids: Sequence[int], media: Sequence[MediaItem]) -> Prefix:
    items = [(item.digest, item.start, item.end) for item in media]
    return Prefix(len(ids), hashlib.sha256(msgspec.msgpack.encode((ids, items))).digest())


def _media_item(item: PreparedItem, start: int, end: int, positions: list[tuple[int, int]]) -> MediaItem:
    layout = item.layout
    shape = (layout.grid, layout.both_ways, layout.seconds_per_frame)
    return MediaItem(item.digest, item.kind, start, end, positions, item.path, *shape)
