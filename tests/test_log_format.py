# SPDX-License-Identifier: Apache-2.0
"""Log lines: one JSON object each, or text in which no client can forge a line."""

from __future__ import annotations

import io
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.logging_setup import (
    ACCESS,
    FORMATTERS,
    JsonFormatter,
    LogHandler,
    ProbeFilter,
    QueryFilter,
    TextFormatter,
    request_id,
)

NASTY = "a\nERROR 12:00:00 quire: forged\r\x1b[2J\x85\u2028b"


def record(message: str, *args: object, name: str = "quire.test", **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.WARNING, "file.py", 7, message, args, fields.pop("exc_info", None))
    vars(made).update(fields)
    return made


def raised(text: str) -> Any:
    try:
        raise ValueError(text)
    except ValueError:
        return sys.exc_info()


def test_json_log_line_has_these_fields() -> None:
    made = record("%d blocks of %s", 3, "x")
    line = json.loads(JsonFormatter().format(made))
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "quire.test", "3 blocks of x")
    assert line.keys() == {"time", "level", "logger", "message", "pid"}
    time = datetime.fromisoformat(line["time"])
    assert time.tzinfo == UTC
    assert abs(time.timestamp() - made.created) < 0.002


def test_an_exception_is_a_field() -> None:
    line = json.loads(JsonFormatter().format(record("oh", exc_info=raised("why"))))
    assert line["message"] == "oh"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: why")


def test_task_request_is_a_log_field_and_a_named_one_goes_first() -> None:
    token = request_id.set("r-1")
    try:
        assert json.loads(JsonFormatter().format(record("x")))["request_id"] == "r-1"
        assert json.loads(JsonFormatter().format(record("x", request_id="r-2")))["request_id"] == "r-2"
    finally:
        request_id.reset(token)
    assert "request_id" not in json.loads(JsonFormatter().format(record("x")))


def test_a_line_of_access_has_fields_and_no_query() -> None:
    made = record(
        '%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", "/v1/models?api_key=s", "1.1", 200, name=ACCESS
    )
    assert QueryFilter().filter(made)
    line = json.loads(JsonFormatter().format(made))
    assert line["message"] == '1.2.3.4:5 - "GET /v1/models HTTP/1.1" 200'
    assert (line["client"], line["method"], line["path"], line["status"]) == (
        "1.2.3.4:5",
        "GET",
        "/v1/models",
        200,
    )


def test_the_scope_of_a_request_loses_its_query() -> None:
    made = record("%s started scope=%s", "x", {"path": "/", "query_string": b"api_key=s"})
    assert QueryFilter().filter(made)
    assert "api_key" not in made.getMessage()


@pytest.mark.parametrize("style", FORMATTERS)
@given(text=st.text() | st.just(NASTY))
def test_a_message_is_one_line(style: str, text: str) -> None:
    line = FORMATTERS[style]().format(record("%s", text))
    assert len(line.splitlines()) == 1
    assert line.replace("\t", "").isprintable() or style == "text"
    assert not any(ord(char) < 32 and char != "\t" for char in line)


@pytest.mark.parametrize("style", FORMATTERS)
@given(text=st.text() | st.just(NASTY))
def test_an_exception_forges_no_line(style: str, text: str) -> None:
    first, *rest = FORMATTERS[style]().format(record("oh", exc_info=raised(text))).splitlines()
    assert "oh" in first
    assert all(line.startswith("  ") for line in rest)


@pytest.mark.parametrize("style", FORMATTERS)
def test_arguments_that_are_no_text_are_logged(style: str) -> None:
    line = FORMATTERS[style]().format(record("%s and %r", object(), b"\xff", request_id=object()))
    assert "object" in line


class Terminal(io.StringIO):
    """Stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_text_line_has_the_local_date_and_time() -> None:
    made = record("x")
    moment = datetime.fromtimestamp(made.created)
    assert TextFormatter().format(made) == f"WARNING {moment:%Y-%m-%d %H:%M:%S} quire.test: x"


def test_level_is_colored_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for stream, begin in ((Terminal(), "\x1b[33mWARNING\x1b[0m 2"), (io.StringIO(), "WARNING 2")):
        monkeypatch.setattr(sys, "stderr", stream)
        LogHandler().handle(record("x"))
        assert stream.getvalue().startswith(begin)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    LogHandler().handle(record("x"))
    LogHandler("json").handle(record("x"))
    assert "\x1b" not in terminal.getvalue()


def test_access_lines_of_probes_are_dropped_unless_they_fail() -> None:
    probes = ProbeFilter()
    probes.paths = frozenset({"/health"})

    def is_kept(path: str, status: int) -> bool:
        args = ("127.0.0.1:1", "GET", path, "1.1", status)
        return probes.filter(record('%s - "%s %s HTTP/%s" %d', *args, name=ACCESS))

    assert [is_kept(path, 200) for path in ("/health", "/health?x=1", "/healthy", "/v1/models")] == [
        False,
        False,
        True,
        True,
    ]
    assert is_kept("/health", 503)
    assert probes.filter(record("no line of access", name=ACCESS))
