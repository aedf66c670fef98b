# SPDX-License-Identifier: Apache-2.0
"""Logging to stderr (stdout holds results only), as text or JSON.

Invariant: importing quire configures no logging; only quire's commands call `configure_logging`. A line that cannot
be written, because nobody reads or the disk is full, is lost and counted; the logging thread neither fails nor blocks.

A record is one line of JSON, or one line of text followed by its indented traceback; so client data in a message
cannot forge a line. Query strings, which may hold keys, are removed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal

from quire.errors import ClientError, ConfigError, QuireError

TEXT_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"
COLORS = {"DEBUG": 2, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 31}
"""Level -> parameter of the terminal's sequence: faint, green, yellow, red."""
ACCESS = "uvicorn.access"
ACCESS_FIELDS = ("client", "method", "path", "http_version", "status")
_BREAKS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
_ESCAPES = {code: repr(chr(code))[1:-1] for code in _BREAKS if chr(code) != "\t"}
_ESCAPES_IN_TRACEBACK = {code: text for code, text in _ESCAPES.items() if chr(code) != "\n"}

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request of the current task; read only by the log."""


class TextFormatter(logging.Formatter):
    """`INFO 2030-01-02 12:00:00 quire.engine: message`, in local time.

    Args:
        color: color the level, for a terminal.
    """

    def __init__(self, *, color: bool = False) -> None:
        super().__init__(TEXT_FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
        self._colors = COLORS if color else {}

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        line = self.formatMessage(record).translate(_ESCAPES)
        if color := self._colors.get(record.levelname):
            line = f"\x1b[{color}m{record.levelname}\x1b[0m{line[len(record.levelname) :]}"
        lines = [line]
        for line in traceback_of(self, record).translate(_ESCAPES_IN_TRACEBACK).split("\n"):
            lines += [f"  {line}"] if line else []
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """JSON object with `time` (ISO 8601, UTC), `level`, `logger`, `message` and `pid`.

    Optional fields are `request_id` and `exception` (a traceback); the HTTP server's access lines have `client`,
    `method`, `path`, `http_version` and `status`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _iso(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        name = getattr(record, "request_id", "") or request_id.get()
        if name:
            line["request_id"] = name
        if (
            record.name == ACCESS
            and isinstance(record.args, tuple)
            and len(record.args) == len(ACCESS_FIELDS)
        ):
            line.update(zip(ACCESS_FIELDS, record.args, strict=True))
        if exception := traceback_of(self, record):
            line["exception"] = exception
        return json.dumps(line, default=str)


# --log-format -> formatter
FORMATTERS: dict[str, Callable[..., logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


class QueryFilter(logging.Filter):
    """Filter that removes the query string from uvicorn's access lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_without_query(arg) for arg in record.args)
        return True


class ProbeFilter(logging.Filter):
    """Filter that drops the access lines of successful requests to some paths; `paths` may be replaced."""

    paths: frozenset[str] = frozenset()

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or len(record.args) != len(ACCESS_FIELDS):
            return True
        _, _, path, _, status = record.args
        return str(path).partition("?")[0] not in self.paths or not str(status).startswith("2")


_WITHOUT_QUERY = QueryFilter()
_WITHOUT_PROBES = ProbeFilter()


def hide_probes(paths: Iterable[str]) -> None:
    """Drop the access lines of successful requests to these paths."""
    _WITHOUT_PROBES.paths = frozenset(paths)
    logging.getLogger(ACCESS).addFilter(_WITHOUT_PROBES)


def hide_queries() -> None:
    """Remove query strings from uvicorn's lines of any level."""
    for name in (ACCESS, "uvicorn.asgi"):
        logging.getLogger(name).addFilter(_WITHOUT_QUERY)


def traceback_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback and the stack of a record, if any."""
    exception = formatter.formatException(record.exc_info) if record.exc_info else record.exc_text
    return "\n".join(filter(None, (exception, record.stack_info)))


def _without_query(arg: object) -> object:
    if isinstance(arg, str):
        return arg.partition("?")[0]
    if isinstance(arg, dict) and "query_string" in arg:
        return {**arg, "query_string": f"<{len(arg['query_string'])} bytes>"}
    return arg


def _iso(seconds: float) -> str:
    """Format a time to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOGGERS = ("quire", "uvicorn", "py.warnings")
EXIT_FAILED = 1  # Exit code of what could not be done, such as loading a model.
EXIT_USAGE = 2  # Exit code of a wrong command, option or value.
MAX_LINES = 10_000  # Lines that may wait for a slow reader.
FLUSH_S = 1.0  # Time that the process's end, or a line for a person, waits for lines to be written.


class StreamWriter:
    """Thread that writes text to stdout or stderr.

    A stream that was replaced in this process (by a test, a notebook) is written to synchronously.

    Attributes:
        num_lost: texts that could not be written, since the start.
    """

    def __init__(self, stream: Literal["stdout", "stderr"]) -> None:
        self._stream = stream
        self._texts: queue.Queue[str] = queue.Queue(MAX_LINES)
        self.num_lost = 0
        self._num_unreported = 0
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Queue a text without blocking."""
        stream, original = getattr(sys, self._stream), getattr(sys, f"__{self._stream}__")
        if stream is not original:
            with contextlib.suppress(OSError, ValueError):  # it may be closed
                print(text, end="", file=stream, flush=True)
        elif stream is not None:
            self._start()
            try:
                self._texts.put_nowait(text)
            except queue.Full:
                self._lose()

    def flush(self) -> None:
        """Wait up to FLUSH_S until all is written."""
        with self._texts.all_tasks_done:
            self._texts.all_tasks_done.wait_for(lambda: not self._texts.unfinished_tasks, FLUSH_S)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"quire-{self._stream}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._write_now(self._texts.get())
            self._texts.task_done()

    def _write_now(self, text: str) -> None:
        """Write past Python's buffer, whose lock would be held while the kernel blocks, and whose rest be written at
        exit.
        """
        lost, note = self._num_unreported, ""
        if lost:
            note = f"{lost} lines before this one could not be written\n"
        data = (note + text).encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(getattr(sys, f"__{self._stream}__").fileno(), data) :]
        except (OSError, ValueError):
            self._lose()
        else:
            self._num_unreported -= lost

    def _lose(self) -> None:
        self.num_lost += 1
        self._num_unreported += 1


class LogHandler(logging.Handler):
    """Log handler that formats in the logging thread and writes through a `StreamWriter`."""

    def __init__(
        self, style: str = "text", level: int = logging.NOTSET, writer: StreamWriter | None = None
    ) -> None:
        super().__init__(level)
        color = {"color": True} if style == "text" and wants_color() else {}
        self.setFormatter(FORMATTERS[style](**color))
        self.writer = writer or StreamWriter("stderr")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # a bug in a log call must not break its caller
            line = self.format(_format_failure(record, error))
        self.writer.write(line + "\n")

    def flush(self) -> None:
        self.writer.flush()


def wants_color() -> bool:
    """Return whether stderr is a terminal that shows colors; NO_COLOR (https://no-color.org) switches them off."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it is closed
        return False


def _format_failure(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    text = f"{record.pathname}:{record.lineno}: this log line cannot be formatted: {error!r}"
    return logging.makeLogRecord(
        {"levelname": "ERROR", "levelno": logging.ERROR, "name": record.name, "msg": text}
    )


def say(text: str, stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """Print a line for the user who started the command, waiting at most FLUSH_S for it to be written."""
    writer = StreamWriter(stream)
    writer.write(text + "\n")
    writer.flush()


def say_error(text: str) -> None:
    """Print a failed command's final message on stderr: a sentence for a person, or a JSON log line."""
    handler = _log_handler()
    if handler is not None and isinstance(handler.formatter, JsonFormatter):
        logging.getLogger("quire").critical("%s", text)
        handler.flush()
    else:
        say(text, "stderr")


def say_failure(error: QuireError) -> int:
    """Print `error: ` and the message of the error that ends a command, and return the process's exit code."""
    say_error(f"error: {error}")
    return EXIT_USAGE if isinstance(error, ConfigError | ClientError) else EXIT_FAILED


def num_lost_lines() -> int:
    """Return the number of lines of this process's log that could not be written."""
    handler = _log_handler()
    return 0 if handler is None else handler.writer.num_lost


def configure_logging(level: str | None = None, style: str | None = None) -> None:
    """Send this process's logs to stderr; None takes the environment variable.

    Args:
        level: one of LEVELS in any case; None: QUIRE_LOG_LEVEL, else INFO.
        style: "text" or "json"; None: QUIRE_LOG_FORMAT, else text.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    level = (level or os.environ.get("QUIRE_LOG_LEVEL", "INFO")).upper()
    if level not in LEVELS:
        raise ConfigError(f"QUIRE_LOG_LEVEL must be one of {', '.join(LEVELS)}, got {level!r}")
    style = style or os.environ.get("QUIRE_LOG_FORMAT", "text")
    if style not in FORMATTERS:
        raise ConfigError(f"QUIRE_LOG_FORMAT must be one of {', '.join(FORMATTERS)}, got {style!r}")
    _reserve_standard_streams()
    handler = LogHandler(style)
    for name in LOGGERS:
        logging.getLogger(name).handlers[:] = [handler]
    logging.getLogger("quire").setLevel(level)
    logging.getLogger("uvicorn.error").name = "uvicorn.server"  # its starts and ends are no errors
    # Other packages' logs, which would otherwise go to stderr unformatted.
    logging.lastResort = LogHandler(style, logging.WARNING, handler.writer)
    logging.captureWarnings(style == "json")
    if style == "json":
        sys.excepthook = functools.partial(_log_uncaught, handler)


def _log_handler() -> LogHandler | None:
    """Return the handler of `configure_logging`, if any."""
    handlers = logging.getLogger("quire").handlers
    return next((handler for handler in handlers if isinstance(handler, LogHandler)), None)


def _log_uncaught(
    handler: LogHandler, kind: type[BaseException], error: BaseException, _: TracebackType | None
) -> None:
    logging.getLogger("quire").critical("the process ends with an unexpected error", exc_info=error)
    handler.flush()


def _reserve_standard_streams() -> None:
    """Open closed standard streams on /dev/null: otherwise a socket gets their number, and prints go to it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
