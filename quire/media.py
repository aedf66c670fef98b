# SPDX-License-Identifier: Apache-2.0
"""Images, videos and other inputs that fill positions of a prompt with embeddings.

Invariant: plain data. The front end, the scheduler and the worker exchange it; pixels stay in a file that the digest
names, so a message is small and a request outlives the process that computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from quire.errors import ValidationError

KINDS = ("image", "video", "audio", "embeds", "text")
DIGEST_BYTES = 32


class Prefix(msgspec.Struct, frozen=True):
    """First `length` positions of a prompt, each of which attends to all of them.

    `digest` is the SHA-256 of their tokens and items, since the cache of each position depends on all of them.
    """

    length: int
    digest: bytes


class MediaItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One input of a prompt whose placeholder tokens take embeddings in place of the token embedding.

    Args:
        digest: SHA-256 of the content and of everything else that determines its embeddings (processor, options).
        kind: "image", "video", "audio", "embeds" (embeddings from the client) or "text" (for an encoder of text).
        start: first position of its placeholders in the prompt, markers around them excluded.
        end: position after the last placeholder.
        runs: positions [first, last) that take embeddings, ascending, within [start, end). Placeholders between two
            runs are ordinary tokens, such as line breaks of an image.
        path: safetensors file with the processor's arrays; for "embeds" with `values` float32 [num_embeddings, H]; for
            "text" empty.
        grid: (frames, rows, columns) of its embeddings, for models that rotate by these three; else zeros.
        both_ways: every position of a run attends to the whole run, the later positions included.
        seconds_per_frame: time between two frames of a video's grid, for models that rotate by time.
        token_ids: of a "text".
        prefix: the first item's only; None: text attends to the positions up to its own.
    """

    digest: bytes
    kind: str
    start: int
    end: int
    runs: list[tuple[int, int]]
    path: str
    grid: tuple[int, int, int] = (0, 0, 0)
    both_ways: bool = False
    seconds_per_frame: float = 0.0
    token_ids: list[int] = []
    prefix: Prefix | None = None

    @property
    def num_embeddings(self) -> int:
        """Number of positions that take an embedding."""
        return sum(last - first for first, last in self.runs)


class EncodeProgress(msgspec.Struct, frozen=True):
    """Result of one slice of encoding.

    Args:
        done: digests whose embeddings the worker now has, those that it had before included.
        failed: digest -> reason, for items that cannot be encoded.
        num_bytes: digest -> bytes of the embeddings, for those that are done.
    """

    done: list[bytes]
    failed: dict[bytes, str]
    num_bytes: dict[bytes, int]


def all_encoded(results: Sequence[EncodeProgress]) -> EncodeProgress:
    """Return the common progress of ranks, each of which encodes all items: done where all are."""
    first, *others = results
    failed = {digest: reason for result in reversed(results) for digest, reason in result.failed.items()}
    common = set(first.done).intersection(*(other.done for other in others)) - failed.keys()
    done = [digest for digest in first.done if digest in common]
    num_bytes = {digest: max(result.num_bytes.get(digest, 0) for result in results) for digest in done}
    return EncodeProgress(done, failed, num_bytes)


def num_embeddings(media: Sequence[MediaItem]) -> int:
    """Return the number of embeddings of all items; the same content counts once."""
    return sum({item.digest: item.num_embeddings for item in media}.values())


def both_ways(media: Sequence[MediaItem]) -> Iterator[tuple[int, int]]:
    """Yield the stretches [first, last) of a prompt each of whose positions attends to the whole stretch."""
    if media and media[0].prefix is not None:
        yield 0, media[0].prefix.length
        return
    for item in media:
        if item.both_ways:
            yield from item.runs


def chunk_end(media: Sequence[MediaItem], start: int, end: int) -> int:
    """Return the last position at most `end` where a chunk that starts at `start` may end; `start` if there is none.

    A chunk never ends inside a stretch that is seen both ways, since its first positions see all of it. It may start
    inside: positions before `start` were computed with the whole stretch in view.
    """
    for first, last in both_ways(media):
        if first < end < last:
            return max(first, start)
    return end


def least_chunk(media: Sequence[MediaItem], start: int) -> int:
    """Return the least number of tokens in a chunk that starts at `start`."""
    for first, last in both_ways(media):
        if first <= start < last:
            return last - start
    return 1


def check_media(media: Sequence[MediaItem], num_prompt_tokens: int, max_num_batched_tokens: int) -> None:
    """Check the items of a prompt.

    Raises:
        ValidationError: an item has an unknown kind or no digest, is out of order or out of the prompt, has runs that
            are out of order or out of the item, or a stretch is seen both ways and exceeds a step's token budget.
    """
    position = 0
    counts: dict[bytes, int] = {}
    for number, item in enumerate(media):
        problem = _problem(item, position, num_prompt_tokens)
        if problem is not None:
            raise ValidationError(f"item {number} of the prompt's media {problem}", param="media")
        if counts.setdefault(item.digest, item.num_embeddings) != item.num_embeddings:
            raise ValidationError(
                f"item {number} of the prompt's media takes {item.num_embeddings} embeddings, and the same content "
                f"before takes {counts[item.digest]}",
                param="media",
            )
        position = item.end
    _check_both_ways(media, num_prompt_tokens, max_num_batched_tokens)


def _check_both_ways(media: Sequence[MediaItem], num_prompt_tokens: int, max_num_batched_tokens: int) -> None:
    prefix = media[0].prefix if media else None
    if prefix is not None and not media[-1].end <= prefix.length <= num_prompt_tokens:
        raise ValidationError(
            f"a prefix of {prefix.length} tokens must hold all media and lie within the prompt's {num_prompt_tokens}",
            param="media",
        )
    for first, last in both_ways(media):
        if last - first > max_num_batched_tokens:
            number = sum(item.start <= first for item in media) - 1
            name = (
                f"{media[number].kind} {number} of the prompt"
                if prefix is None
                else "the prompt with its images"
            )
            raise ValidationError(
                f"{name} takes {last - first} tokens, which this model computes in one step, and a step takes "
                f"{max_num_batched_tokens}: send less, or start with a larger --max-num-batched-tokens",
                param="media",
            )


def _problem(item: MediaItem, position: int, num_prompt_tokens: int) -> str | None:
    """Return a malformed item's problem; `position` is the end of the item before."""
    if item.kind not in KINDS:
        return f"is of kind {item.kind!r}; kinds are {', '.join(KINDS)}"
    if len(item.digest) != DIGEST_BYTES:
        return f"has a digest of {len(item.digest)} bytes, which must be of {DIGEST_BYTES}"
    if not position <= item.start < item.end <= num_prompt_tokens:
        return (
            f"fills positions {item.start} to {item.end}, which must follow one another within the range of {position} "
            f"to {num_prompt_tokens}: items stand in order, without overlaps, inside the prompt"
        )
    if not item.runs:
        return "has no positions that take embeddings"
    last_end = item.start
    for first, last in item.runs:
        if not last_end <= first < last <= item.end:
            return (
                f"has a run of embeddings at {first} to {last}; runs are ascending, without overlaps, within "
                f"{item.start} to {item.end}"
            )
        last_end = last
    return None
