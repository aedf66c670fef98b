# SPDX-License-Identifier: Apache-2.0
"""Agreement checks between ranks, at startup and before steps that each rank plans by itself."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import torch

from quire.distributed.group import Group
from quire.errors import StartupError

_WORD_BYTES = 64


def check_same(group: Group, facts: Mapping[str, bytes]) -> None:
    """Check that every rank has the same facts; all ranks use the same names.

    Raises:
        StartupError: a fact differs; names it, and the ranks that differ from rank 0.
    """
    for name, ranks in zip(facts, different_ranks(group, list(facts.values())), strict=True):
        if ranks:
            others = ", ".join(map(str, ranks))
            raise StartupError(
                f"all ranks must have the same {name}, but rank 0's differs from that of {others}"
            )


def check_same_word(group: Group, name: str, word: str, advice: str) -> None:
    """Check that every rank has the same short word.

    Raises:
        StartupError: the ranks differ; has every word, and the advice.
    """
    own = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
    said = word.encode()[:_WORD_BYTES]
    own[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    words = [bytes(found.tolist()).rstrip(b"\0").decode(errors="replace") for found in group.all_gather(own)]
    if len({*words}) > 1:
        ranks_of = {one: [rank for rank, other in enumerate(words) if other == one] for one in words}
        who = ", ".join(f"{one} on ranks {', '.join(map(str, ranks))}" for one, ranks in ranks_of.items())
        raise StartupError(f"all ranks must have the same {name}: {who}; {advice}")


def different_ranks(group: Group, facts: list[bytes]) -> list[list[int]]:
    """Return, for each fact, the ranks whose value differs from rank 0's."""
    own = torch.frombuffer(bytearray(b"".join(sha256(fact).digest() for fact in facts)), dtype=torch.uint8)
    first, *others = (found.view(len(facts), -1) for found in group.all_gather(own))
    return [
        [rank for rank, other in enumerate(others, 1) if not torch.equal(other[index], first[index])]
        for index in range(len(facts))
    ]
