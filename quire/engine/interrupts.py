"""Holds Ctrl-C back while a step runs.

Invariant: a plan that was made is carried out and its result taken in, or the engine is not used again; the scheduler
and the worker would otherwise no longer agree on who has which rows and blocks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Raise a KeyboardInterrupt that comes meanwhile when the block has ended, and a second one at once.

    Does nothing in other threads than the main one, and where the program handles the signal itself.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def hold(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
