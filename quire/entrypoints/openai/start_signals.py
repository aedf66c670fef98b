"""Signals that come before there is anything to drain.

Invariant: the first one ends the start with exit code 0, whatever becomes on its way of the exception that says so.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


def drain_signals() -> list[signal.Signals]:
    """Those that end the server once its work is done; a closed terminal's only without `nohup`, which ignores it."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    return signals if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else signals[:2]


class StartSignals:
    """Around a start: a signal ends the block, without an error, until the lifecycle takes the signals over.

    What is raised is no KeyboardInterrupt: one that has passed through `exec`, which dataclasses are made by, lets
    CPython end the process by SIGINT in spite of all who caught it. Nor need it arrive: pydantic's C code makes an
    error of its own from it, and a callback of the collector only prints it. So the block ends without an error
    whatever comes out of it, and `check` raises what was lost. Later signals change nothing: the end is under way.
    """

    def __init__(self) -> None:
        self._came = False

    def check(self) -> None:
        """End the block if a signal came."""
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
