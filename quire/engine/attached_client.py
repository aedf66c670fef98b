# SPDX-License-Identifier: Apache-2.0
"""Clients of cores that another process of the server has started, and of those that are still to come.

`AttachedClient` neither starts nor ends its core; the owner reports its death (`leave`).
"""

from __future__ import annotations

import threading
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.client import PROGRESS, CoreAddress, CoreClient, RemoteClient
from quire.engine.core_progress import ProgressFile
from quire.engine.messages import Attach, CoreMessage, CoreRequest
from quire.errors import EngineDeadError


class AttachedClient(RemoteClient):
    """Client of a core that another front end started.

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
        """Mark the core as gone; `receive` reports it after the pending messages."""
        self._left.set()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._release()

    def _open_progress(self, config: EngineConfig) -> ProgressFile:
        return ProgressFile(self._directory / PROGRESS)

    def _connect_core(self, config: EngineConfig) -> int:
        self.send(Attach(self._front_end))
        return self._address.pid

    def _is_gone(self) -> bool:
        return self._left.is_set()

    def _why_gone(self) -> str:
        return "its owner lost it"

    def _on_hang(self, silent_s: float) -> None:
        """No action; the owner detects the hang."""


class PendingCoreClient(CoreClient):
    """Placeholder for a core that is still to come: `receive` fails at once, so a replacement is awaited."""

    def send(self, message: CoreRequest) -> None:
        """Drop the message; unfinished work is sent to the next core."""

    def receive(self) -> list[CoreMessage]:
        raise EngineDeadError("there is no engine core yet")

    def close(self) -> None:
        pass
