"""Explanations as they come over the wire, back in their type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from quire.errors import NotFoundError
from quire.scheduler.explain import Explanation


def explanations(found: Iterable[Any], request_id: str) -> list[Explanation]:
    """What the core said about the sequences of a request, less those it does not know.

    Raises:
        NotFoundError: it knows none of them.
    """
    known = [msgspec.convert(one, Explanation) for one in found if one is not None]
    if not known:
        raise NotFoundError(f"no request {request_id!r:.100} is known to the engine", param="request_id")
    return known
