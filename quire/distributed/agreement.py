"""What all ranks must have in common, compared before they begin."""

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
    for name, fact in facts.items():
        own = torch.frombuffer(bytearray(sha256(fact).digest()), dtype=torch.uint8)
        first, *others = group.all_gather(own)
        different = [rank for rank, other in enumerate(others, 1) if not torch.equal(other, first)]
        if different:
            ranks = ", ".join(map(str, different))
            raise StartupError(f"all ranks must have the same {name}, and rank 0 has another than {ranks}")
