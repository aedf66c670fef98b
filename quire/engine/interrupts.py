"""Holds Ctrl-C back while a step runs.

Invariant: a plan that was made is carried out and its result taken in, or the engine is not used again; the scheduler
and the worker would otherwise no longer agree on who has which rows and blocks.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class HeldInterrupts:
    """Around a block: raise a KeyboardInterrupt that comes meanwhile when it has ended, and a second one at once.

    Does nothing in other threads than the main one, inside another such block, and where the program handles the signal
    itself.
    """

    _is_active = False  # of the main thread, so of the process

    def __init__(self) -> None:
        self._came = False
        self._holds = False

    def __enter__(self) -> None:
        if HeldInterrupts._is_active or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._holds = HeldInterrupts._is_active = True
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            HeldInterrupts._is_active = False
            if self._came and failure is None:
                raise KeyboardInterrupt

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
