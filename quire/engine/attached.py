"""`AttachedClient`: a core that another process of the server started and owns.

Invariant: it neither starts nor ends the core. That the core is gone, its owner says (`leave`).
"""

from __future__ import annotations

import threading
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.core_client import CoreClient
from quire.engine.messages import Attach, CoreMessage, CoreRequest
from quire.engine.progress import Progress
from quire.engine.remote import PROGRESS, CoreAddress, RemoteClient
from quire.errors import EngineDeadError


class AttachedClient(RemoteClient):
    """One of several front ends of a core.

    Raises:
        OSError, ZMQError: that core is gone already.
    """

    def __init__(self, config: EngineConfig, address: CoreAddress, front_end: int) -> None:
        self._address = address
        self._front_end = front_end
        self._left = threading.Event()
        super().__init__(config, Path(address.directory), front_end)

    @property
    def stalls(self) -> bool:
        return self._left.is_set() or super().stalls

    def leave(self) -> None:
        """The core is gone; `receive` says so when it has handed out what came before."""
        self._left.set()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._release()

    def _open_progress(self, config: EngineConfig) -> Progress:
        return Progress(self._directory / PROGRESS)

    def _reach_core(self, config: EngineConfig) -> int:
        self.send(Attach(self._front_end))
        return self._address.pid

    def _is_gone(self) -> bool:
        return self._left.is_set()

    def _why_gone(self) -> str:
        return "its owner lost it"

    def _on_hang(self, silent_s: float) -> None:
        """Its owner sees that, too."""


class NoCore(CoreClient):
    """In place of the client for a core that is still to come: it is lost at once, so another is waited for."""

    def send(self, message: CoreRequest) -> None:
        """All that is sent is unfinished, and goes to the next."""

    def receive(self) -> list[CoreMessage]:
        raise EngineDeadError("there is no engine core yet")

    def close(self) -> None:
        """There is nothing to end."""
