# SPDX-License-Identifier: Apache-2.0
"""Signals during start-up, before there are requests to drain.

Invariant: the first signal ends the start with exit code 0, even if its exception is lost or replaced on the way.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


def drain_signals() -> list[signal.Signals]:
    """Return the signals that drain; SIGHUP only without `nohup`, which ignores it."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    return signals if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else signals[:2]


class StartSignals:
    """Context manager around start-up: a signal ends the block without an error, until the lifecycle handles signals.

    SystemExit is raised, not KeyboardInterrupt: one that passes through `exec` (dataclasses use it) makes CPython end
    the process by SIGINT even if it was caught. The exception may also get lost: pydantic's C code replaces it, and a
    garbage collector callback only prints it. So the block ends without an error whatever comes out of it, and `check`
    raises what was lost. Later signals have no effect.
    """

    def __init__(self) -> None:
        self._came = False

    def check(self) -> None:
        """End the block if a signal arrived."""
        if self._came:
            raise SystemExit(0)

    def __enter__(self) -> StartSignals:
        signals = (*drain_signals(), signal.SIGQUIT)
        self._previous = {number: signal.signal(number, self._end) for number in signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        return self._came

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._came:
            self._came = True
            raise SystemExit(0)
