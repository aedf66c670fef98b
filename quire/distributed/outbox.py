"""Messages on their way, so that whoever sends them goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Outbox:
    """Delivers in order, on a thread of its own, until a delivery fails, which later ones do, too."""

    def __init__(self) -> None:
        self._deliveries: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="quire-outbox", daemon=True).start()

    def put(self, deliver: Callable[[], None]) -> None:
        """Have this called behind what was put before; raises what that has raised."""
        if self._failure is not None:
            raise self._failure
        self._deliveries.put(deliver)

    def _run(self) -> None:
        while self._failure is None:
            try:
                self._deliveries.get()()
            except BaseException as failure:
                self._failure = failure
