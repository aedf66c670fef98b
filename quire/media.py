"""Images, videos and other inputs that fill positions of a prompt with embeddings.

Invariant: plain data. The front end, the scheduler and the worker exchange it; pixels stay in a file that the digest
names, so a message is small and a request outlives the process that computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class MediaItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One input of a prompt whose placeholder tokens take embeddings in place of the token embedding.

    Args:
        digest: SHA-256 of the content and of everything else that determines its embeddings (processor, options).
        kind: "image", "video" or "embeds" (embeddings from the client).
        start: first position of its placeholders in the prompt, markers around them excluded.
        end: position after the last placeholder.
        runs: positions [first, last) that take embeddings, ascending, within [start, end). Placeholders between two
            runs are ordinary tokens, such as line breaks of an image.
        path: safetensors file with the processor's arrays; for "embeds" with `values` float32 [num_embeddings, H].
        grid: (frames, rows, columns) of its embeddings, for models that rotate by these three; else zeros.
        both_ways: every position in [start, end) attends to the whole of it, the later positions included.
        seconds_per_frame: time between two frames of a video's grid, for models that rotate by time.
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


def chunk_end(media: Sequence[MediaItem], start: int, end: int) -> int:
    """Return the last position at most `end` where a chunk that starts at `start` may end; `start` if there is none.

    A chunk never ends inside an item that attends both ways, unless it also starts inside it: positions before `start`
    were computed with the whole item in view.
    """
    for item in media:
        if item.both_ways and start <= item.start < end < item.end:
            return item.start
    return end
