"""Names of the prefix cache's blocks: a block's hash stands for all tokens from the start to its end.

Invariant: two blocks have the same hash only if their tokens, all tokens before them and their extra keys are
the same. SHA-256 makes that hold against people who choose their prompts to break it.
"""

from __future__ import annotations

import hashlib

import msgspec

BlockHash = bytes
"""SHA-256 digest, `HASH_BYTES` long; in the block pool the number of the group follows, 4 bytes big-endian."""

HASH_BYTES = 32
_ROOT: BlockHash = b""
_encoder = msgspec.msgpack.Encoder()


class MediaKey(msgspec.Struct, frozen=True, array_like=True):
    """Content that stands behind placeholder tokens: its digest, and the positions [start, end) that it fills."""

    digest: bytes
    start: int
    end: int


class ExtraKeys(msgspec.Struct, frozen=True, array_like=True):
    """What, beside the tokens, the content of a block or the right to read it depends on.

    Args:
        cache_salt: who may share; no default, because who hashes must say whose cache it is (None: everybody's).
        adapter: name of the weights that are added to the model's, which change every key and value.
        media: in the order of their positions, without overlaps.
    """

    cache_salt: str | None
    adapter: str | None = None
    media: tuple[MediaKey, ...] = ()

    def of_block(self, start: int, end: int) -> ExtraKeys:
        """The keys of a block of positions [start, end): of the media, those of which it holds a part."""
        if not self.media:
            return self
        media = tuple(item for item in self.media if item.start < end and start < item.end)
        return ExtraKeys(self.cache_salt, self.adapter, media)


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
