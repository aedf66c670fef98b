"""Request ids that clients give, in the header `x-request-id`.

Invariant: such an id names a request in answers, logs and questions, and is no key to anything: answers and the engine
have ids of our own, so two requests may bring the same one.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers

HEADER = "x-request-id"
MAX_CHARS = 128
MAX_ENDED = 1024  # requests that are found by their client's id after they ended
_SANE = re.compile(rf"[A-Za-z0-9._:=@+~-]{{1,{MAX_CHARS}}}")


def given_id(headers: Headers) -> str | None:
    """Return the client's id for a request; None if there is none, or several, or one that a log should not have."""
    values = headers.getlist(HEADER)
    return values[0] if len(values) == 1 and _SANE.fullmatch(values[0]) else None


class ClientIds:
    """Our ids of requests by those that their clients gave: of all in flight, and of the last that ended."""

    def __init__(self) -> None:
        self._own: defaultdict[str, list[str]] = defaultdict(list)
        self._ended: deque[tuple[str, str]] = deque()

    @contextmanager
    def used(self, client_id: str, own_id: str) -> Iterator[None]:
        """Know a request while it is in flight, and for a while after."""
        self._own[client_id].append(own_id)
        try:
            yield
        finally:
            self._ended.append((client_id, own_id))
            if len(self._ended) > MAX_ENDED:
                self._forget(*self._ended.popleft())

    def names_of(self, request_id: str) -> list[str]:
        """Return an id as it is, and our ids of the requests that came with it."""
        return [request_id, *self._own.get(request_id, ())]

    def _forget(self, client_id: str, own_id: str) -> None:
        self._own[client_id].remove(own_id)
        if not self._own[client_id]:
            del self._own[client_id]
