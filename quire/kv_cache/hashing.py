# SPDX-License-Identifier: Apache-2.0
"""Hashes of prefix cache blocks: each covers all tokens from the start of the sequence to the block's end.

Invariant: two blocks have the same hash only if their tokens, all tokens before them and their extra keys are the
same. SHA-256 makes that hold against crafted prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from quire.media import MediaItem

BlockHash = bytes
"""SHA-256 digest of `HASH_BYTES`; block pool keys append the group id, 4 bytes big-endian."""

HASH_BYTES = 32
_ROOT: BlockHash = b""
_encoder = msgspec.msgpack.Encoder()


class MediaKey(msgspec.Struct, frozen=True, array_like=True):
    """Content on which positions [start, end) depend beside the tokens up to their own: its digest."""

    digest: bytes
    start: int
    end: int


class ExtraKeys(msgspec.Struct, frozen=True, array_like=True):
    """Inputs to a block's hash besides the tokens: they determine its content or the right to read it.

    Args:
        cache_salt: scope of sharing; no default, so that callers must decide (None: shared by all).
        adapter: key of the adapter, which changes every key and value.
        media: items in order of position, and the prefix that attends both ways before them, if there is one.
    """

    cache_salt: str | None
    adapter: str | None = None
    media: tuple[MediaKey, ...] = ()

    def of_block(self, start: int, end: int) -> ExtraKeys:
        """Return the keys of a block of positions [start, end), with the media that overlap it."""
        if not self.media:
            return self
        media = tuple(item for item in self.media if item.start < end and start < item.end)
        return ExtraKeys(self.cache_salt, self.adapter, media)


def extra_keys(cache_salt: str | None, adapter: str | None, media: Sequence[MediaItem] = ()) -> ExtraKeys:
    """Return the extra keys of a sequence with these items."""
    keys = [MediaKey(item.digest, item.start, item.end) for item in media]
    if media and (prefix := media[0].prefix) is not None:
        keys.insert(0, MediaKey(prefix.digest, 0, prefix.length))
    return ExtraKeys(cache_salt, adapter, tuple(keys))


def extend_hashes(
    existing: list[BlockHash], token_ids: list[int], block_size: int, extra_keys: ExtraKeys
) -> None:
    """Append to `existing`, the hashes of a sequence's first blocks, those of its later full blocks.

    A hash is taken over the msgpack encoding of (parent hash, token ids, extra keys of the block), which is typed and
    self-delimiting, so that no two different inputs share an encoding. A last, partial block has no hash.
    """
    parent = existing[-1] if existing else _ROOT
    for start in range(len(existing) * block_size, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        block = (parent, token_ids[start:end], extra_keys.of_block(start, end))
        parent = hashlib.sha256(_encoder.encode(block)).digest()
        existing.append(parent)
