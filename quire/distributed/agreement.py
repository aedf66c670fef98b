"""What all ranks must have in common, compared before they begin, and before steps that each plans by itself."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import torch

from quire.distributed.group import Group
from quire.errors import StartupError


def check_same(group: Group, facts: Mapping[str, bytes]) -> None:
    """Every rank must have the same facts, which all name alike.

    Raises:
        StartupError: one differs; the message names it, and the ranks that have another than rank 0.
    """
    for name, ranks in zip(facts, different_ranks(group, list(facts.values())), strict=True):
        if ranks:
            others = ", ".join(map(str, ranks))
            raise StartupError(f"all ranks must have the same {name}, and rank 0 has another than {others}")


def different_ranks(group: Group, facts: list[bytes]) -> list[list[int]]:
    """For each fact, of which every rank has one, the ranks that have another than rank 0."""
    own = torch.frombuffer(bytearray(b"".join(sha256(fact).digest() for fact in facts)), dtype=torch.uint8)
    first, *others = (found.view(len(facts), -1) for found in group.all_gather(own))
    return [
        [rank for rank, other in enumerate(others, 1) if not torch.equal(other[index], first[index])]
        for index in range(len(facts))
    ]
