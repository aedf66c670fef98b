"""What a line of the log looks like: text for people, or JSON for machines.

Invariant: a record is one line of JSON, or one line of text that its traceback follows, indented; so nothing that a
client can get into a message looks like a line of its own. Query strings, which may hold keys, are in no line.
"""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any

TEXT_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"
ACCESS = "uvicorn.access"
ACCESS_FIELDS = ("client", "method", "path", "http_version", "status")
_BREAKS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
_ESCAPES = {code: repr(chr(code))[1:-1] for code in _BREAKS if chr(code) != "\t"}
_ESCAPES_IN_TRACEBACK = {code: text for code, text in _ESCAPES.items() if chr(code) != "\n"}

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the HTTP request in whose task a line is written. Nothing but the log reads it."""


class TextFormatter(logging.Formatter):
    """`INFO 12:00:00 quire.engine: message`."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT, datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        lines = [self.formatMessage(record).translate(_ESCAPES)]
        for line in traceback_of(self, record).translate(_ESCAPES_IN_TRACEBACK).split("\n"):
            lines += [f"  {line}"] if line else []
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One object of `time` (ISO 8601, UTC), `level`, `logger`, `message` and `pid`.

    Where there is one also `request_id` and `exception` (a traceback); lines of the HTTP server about a request have
    `client`, `method`, `path`, `http_version` and `status`.
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


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}
"""`--log-format` -> how a record becomes a line."""


class WithoutQuery(logging.Filter):
    """Takes the query string out of the lines that uvicorn writes about a request."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_without_query(arg) for arg in record.args)
        return True


_WITHOUT_QUERY = WithoutQuery()


def hide_queries() -> None:
    """Let no line of uvicorn, at any level, hold a query string."""
    for name in (ACCESS, "uvicorn.asgi"):
        logging.getLogger(name).addFilter(_WITHOUT_QUERY)


def traceback_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback that a record brings, if any, and the stack."""
    exception = formatter.formatException(record.exc_info) if record.exc_info else record.exc_text
    return "\n".join(filter(None, (exception, record.stack_info)))


def _without_query(arg: object) -> object:
    if isinstance(arg, str):
        return arg.partition("?")[0]
    if isinstance(arg, dict) and "query_string" in arg:
        return {**arg, "query_string": f"<{len(arg['query_string'])} bytes>"}
    return arg


def _iso(seconds: float) -> str:
    """To the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
