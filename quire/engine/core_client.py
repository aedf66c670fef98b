"""How a front end reaches its engine core: the one interface of all transports.

Invariant: `send` never blocks; `receive` blocks and is called from one thread at a time; after `close` neither is
called. A core that cannot start or dies surfaces as an exception from `receive`, and from each `receive` after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from quire.engine.messages import CoreMessage, CoreRequest


class CoreClient(ABC):
    """A connection to one engine core."""

    @property
    def stalls(self) -> bool:
        """Whether the core seems to hang; `receive` finds out."""
        return False

    def in_work(self, request_ids: Iterable[str]) -> set[str]:
        """Those of these requests on which the core works, or worked when it died, if that can be told."""
        return set()

    @abstractmethod
    def send(self, message: CoreRequest) -> None:
        """Queue a message for the core."""

    @abstractmethod
    def receive(self) -> list[CoreMessage]:
        """Wait for the core's next messages; the first ever is `CoreReady`. Empty when the client was closed.

        Raises:
            StartupError: the core could not start.
            EngineDeadError: the core died.
        """

    @abstractmethod
    def close(self) -> None:
        """End the core and release everything; calling it twice is fine."""
