"""Names of the prefix cache's blocks: a block's hash stands for all tokens from the start to its end.

Invariant: two blocks have the same hash only if their tokens, all tokens before them and their extra keys are
the same. SHA-256 makes that hold against people who choose their prompts to break it.
"""

from __future__ import annotations

import hashlib

import msgspec

BlockHash = bytes
"""SHA-256 digest, 32 bytes."""

_ROOT: BlockHash = b""
_encoder = msgspec.msgpack.Encoder()


class ExtraKeys(msgspec.Struct, frozen=True, array_like=True):
    """What, beside the tokens, the content of a block or the right to read it depends on.

    `cache_salt` has no default: who hashes must say whose cache it is (None: everybody's).
    """

    cache_salt: str | None


def extend_hashes(
    existing: list[BlockHash], token_ids: list[int], block_size: int, extra_keys: ExtraKeys
) -> None:
    """Append to `existing`, the hashes of a sequence's first blocks, those of its later full blocks.

    A hash is taken over the msgpack encoding of (parent hash, token ids, extra keys), which is typed and
    self-delimiting, so that no two different inputs share an encoding. A last, partial block has no hash.
    """
    parent = existing[-1] if existing else _ROOT
    for start in range(len(existing) * block_size, len(token_ids) - block_size + 1, block_size):
        block = (parent, token_ids[start : start + block_size], extra_keys)
        parent = hashlib.sha256(_encoder.encode(block)).digest()
        existing.append(parent)
