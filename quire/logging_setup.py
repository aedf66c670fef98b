"""Where quire's log lines go: stderr, one short line each, so that stdout holds results only.

Invariant: importing quire configures no logging; only a command of ours calls `configure_logging`. A line that cannot
be written, because nobody reads or the disk is full, is lost and counted; whoever logs it meets no error and no wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from typing import Literal

from quire.errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"
LOGGERS = ("quire", "uvicorn")
MAX_LINES = 10_000
"""So many lines may wait for a reader that is slow."""
FLUSH_S = 1.0
"""How long the end of the process, or a line for a person, waits for lines to be written."""


class Scribe:
    """Writes text to stdout or stderr from a thread of its own.

    A stream that somebody in this process has put there instead (a test, a notebook) is written to at once.
    """

    def __init__(self, stream: Literal["stdout", "stderr"]) -> None:
        self._stream = stream
        self._texts: queue.Queue[str] = queue.Queue(MAX_LINES)
        self._num_lost = 0
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Hand a text over, without waiting."""
        stream, original = getattr(sys, self._stream), getattr(sys, f"__{self._stream}__")
        if stream is not original:
            with contextlib.suppress(OSError, ValueError):  # it may be closed, too
                print(text, end="", file=stream, flush=True)
        elif stream is not None:
            self._start()
            try:
                self._texts.put_nowait(text)
            except queue.Full:
                self._num_lost += 1

    def flush(self) -> None:
        """Wait until all is written, but no longer than FLUSH_S."""
        with self._texts.all_tasks_done:
            self._texts.all_tasks_done.wait_for(lambda: not self._texts.unfinished_tasks, FLUSH_S)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"quire-{self._stream}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._put_out(self._texts.get())
            self._texts.task_done()

    def _put_out(self, text: str) -> None:
        """Past Python's own buffer: its lock would be held while the kernel waits, and its rest be written at exit."""
        lost, note = self._num_lost, ""
        if lost:
            note = f"{lost} lines before this one could not be written\n"
        data = (note + text).encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(getattr(sys, f"__{self._stream}__").fileno(), data) :]
        except (OSError, ValueError):
            self._num_lost += 1
        else:
            self._num_lost -= lost


class LogHandler(logging.Handler):
    """Formats a record in the thread that logs it, and leaves the writing to a scribe."""

    def __init__(self) -> None:
        super().__init__()
        self._scribe = Scribe("stderr")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a bug in a log call must not become one of what it tells about
            line = f"ERROR {record.pathname}:{record.lineno}: this line of the log cannot be made: {error!r}"
        self._scribe.write(line + "\n")

    def flush(self) -> None:
        self._scribe.flush()


def say(text: str, stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """A line for the person who started the command, waiting at most FLUSH_S for it to be written."""
    scribe = Scribe(stream)
    scribe.write(text + "\n")
    scribe.flush()


def configure_logging() -> None:
    """Send the logs of quire and its HTTP server to stderr, ours at the level of QUIRE_LOG_LEVEL (default INFO).

    Raises:
        ConfigError: the level has no such name.
    """
    level = os.environ.get("QUIRE_LOG_LEVEL", "INFO").upper()
    if level not in LEVELS:
        raise ConfigError(f"QUIRE_LOG_LEVEL must be one of {', '.join(LEVELS)}, got {level!r}")
    _occupy_standard_streams()
    handler = LogHandler()
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    for name in LOGGERS:
        logging.getLogger(name).handlers[:] = [handler]
    logging.getLogger("quire").setLevel(level)


def _occupy_standard_streams() -> None:
    """Give the numbers of standard streams that are closed to nothing: else a socket gets one, and prints go to it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
