"""What a rank does about the Ray actor that has started it: that one is stopped nobody else would see.

An actor that is stopped does nothing but keep its place: it cannot end its rank, nor be ended by Ray's own messages. So
its rank ends it, by the one signal that needs no consent; Ray sees that, and says it to the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

from quire.processes import STOPPED, why_silent

logger = logging.getLogger(__name__)

LOOK_S = 0.5
LOOKS_AT_STOPPED = 10
"""In turn, before it is ended."""


def watch_actor() -> None:
    """Look at this process's parent, an actor, from time to time, for as long as it is that."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="quire-actor-watch", daemon=True).start()


def _watch(actor: int) -> None:
    looks = 0
    while os.getppid() == actor:
        looks = looks + 1 if why_silent(actor) == STOPPED else 0
        if looks >= LOOKS_AT_STOPPED:
            logger.error("the actor of this rank, process %d, is stopped, and ended therefore", actor)
            os.kill(actor, signal.SIGKILL)
            return
        time.sleep(LOOK_S)
