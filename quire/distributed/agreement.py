"""What all ranks must have in common, compared before they begin, and before steps that each plans by itself."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import torch

from quire.distributed.group import Group
from quire.errors import StartupError

_WORD_BYTES = 64


def check_same(group: Group, facts: Mapping[str, bytes]) -> None:
    """Every rank must have the same facts, which all name alike.

    Raises:
        StartupError: one differs; the message names it, and the ranks that have another than rank 0.
    """
    for name, ranks in zip(facts, different_ranks(group, list(facts.values())), strict=True):
        if ranks:
            others = ", ".join(map(str, ranks))
            raise StartupError(f"all ranks must have the same {name}, and rank 0 has another than {others}")


def check_same_word(group: Group, name: str, word: str, advice: str) -> None:
    """Every rank must say the same, which is short enough to be told to all.

    Raises:
        StartupError: one says something else; the message has what each says, and the advice.
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
    """For each fact, of which every rank has one, the ranks that have another than rank 0."""
    own = torch.frombuffer(bytearray(b"".join(sha256(fact).digest() for fact in facts)), dtype=torch.uint8)
    first, *others = (found.view(len(facts), -1) for found in group.all_gather(own))
    return [
        [rank for rank, other in enumerate(others, 1) if not torch.equal(other[index], first[index])]
        for index in range(len(facts))
    ]
