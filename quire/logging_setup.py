"""Where quire's log lines go: stderr, so that stdout holds results only; `log_format` says what they look like.

Invariant: importing quire configures no logging; only a command of ours calls `configure_logging`. A line that cannot
be written, because nobody reads or the disk is full, is lost and counted; whoever logs it meets no error and no wait.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import sys
import threading
from types import TracebackType
from typing import Literal

from quire.errors import ConfigError
from quire.log_format import FORMATTERS, JsonFormatter

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOGGERS = ("quire", "uvicorn", "py.warnings")
MAX_LINES = 10_000
"""So many lines may wait for a reader that is slow."""
FLUSH_S = 1.0
"""How long the end of the process, or a line for a person, waits for lines to be written."""


class Scribe:
    """Writes text to stdout or stderr from a thread of its own.

    A stream that somebody in this process has put there instead (a test, a notebook) is written to at once.

    Attributes:
        num_lost: texts that could not be written, since the beginning.
    """

    def __init__(self, stream: Literal["stdout", "stderr"]) -> None:
        self._stream = stream
        self._texts: queue.Queue[str] = queue.Queue(MAX_LINES)
        self.num_lost = 0
        self._num_untold = 0
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
                self._lose()

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
        lost, note = self._num_untold, ""
        if lost:
            note = f"{lost} lines before this one could not be written\n"
        data = (note + text).encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(getattr(sys, f"__{self._stream}__").fileno(), data) :]
        except (OSError, ValueError):
            self._lose()
        else:
            self._num_untold -= lost

    def _lose(self) -> None:
        self.num_lost += 1
        self._num_untold += 1


class LogHandler(logging.Handler):
    """Formats a record in the thread that logs it, and leaves the writing to a scribe."""

    def __init__(
        self, style: str = "text", level: int = logging.NOTSET, scribe: Scribe | None = None
    ) -> None:
        super().__init__(level)
        self.setFormatter(FORMATTERS[style]())
        self.scribe = scribe or Scribe("stderr")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a bug in a log call must not become one of what it tells about
            line = self.format(_unmakable(record, error))
        self.scribe.write(line + "\n")

    def flush(self) -> None:
        self.scribe.flush()


def _unmakable(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    text = f"{record.pathname}:{record.lineno}: this line of the log cannot be made: {error!r}"
    return logging.makeLogRecord(
        {"levelname": "ERROR", "levelno": logging.ERROR, "name": record.name, "msg": text}
    )


def say(text: str, stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """A line for the person who started the command, waiting at most FLUSH_S for it to be written."""
    scribe = Scribe(stream)
    scribe.write(text + "\n")
    scribe.flush()


def say_error(text: str) -> None:
    """The last word of a command that failed, on stderr: a sentence for a person, or a line of a log in JSON."""
    handler = _log_handler()
    if handler is not None and isinstance(handler.formatter, JsonFormatter):
        logging.getLogger("quire").critical("%s", text)
        handler.flush()
    else:
        say(text, "stderr")


def num_lost_lines() -> int:
    """Lines of this process's log that could not be written."""
    handler = _log_handler()
    return 0 if handler is None else handler.scribe.num_lost


def configure_logging(level: str | None = None, style: str | None = None) -> None:
    """Send the logs of this process to stderr, quire's from a level on; what is None says the environment.

    Args:
        level: one of LEVELS in any case; None: QUIRE_LOG_LEVEL, else INFO.
        style: "text" or "json"; None: QUIRE_LOG_FORMAT, else text.

    Raises:
        ConfigError: a variable has no such value.
    """
    level = (level or os.environ.get("QUIRE_LOG_LEVEL", "INFO")).upper()
    if level not in LEVELS:
        raise ConfigError(f"QUIRE_LOG_LEVEL must be one of {', '.join(LEVELS)}, got {level!r}")
    style = style or os.environ.get("QUIRE_LOG_FORMAT", "text")
    if style not in FORMATTERS:
        raise ConfigError(f"QUIRE_LOG_FORMAT must be one of {', '.join(FORMATTERS)}, got {style!r}")
    _occupy_standard_streams()
    handler = LogHandler(style)
    for name in LOGGERS:
        logging.getLogger(name).handlers[:] = [handler]
    logging.getLogger("quire").setLevel(level)
    # What other packages log; it would go to stderr as it is.
    logging.lastResort = LogHandler(style, logging.WARNING, handler.scribe)
    logging.captureWarnings(style == "json")
    if style == "json":
        sys.excepthook = functools.partial(_log_uncaught, handler)


def _log_handler() -> LogHandler | None:
    """As `configure_logging` has made it."""
    handlers = logging.getLogger("quire").handlers
    return next((handler for handler in handlers if isinstance(handler, LogHandler)), None)


def _log_uncaught(
    handler: LogHandler, kind: type[BaseException], error: BaseException, _: TracebackType | None
) -> None:
    logging.getLogger("quire").critical("the process ends with an error that nobody expected", exc_info=error)
    handler.flush()


def _occupy_standard_streams() -> None:
    """Give the numbers of standard streams that are closed to nothing: else a socket gets one, and prints go to it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
