# SPDX-License-Identifier: Apache-2.0
"""`configure_logging`."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from quire.errors import ConfigError
from quire.logging_setup import (
    FLUSH_S,
    LOGGERS,
    LogHandler,
    StreamWriter,
    configure_logging,
    num_lost_lines,
    say_error,
)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    hook, last_resort = sys.excepthook, logging.lastResort
    yield
    sys.excepthook, logging.lastResort = hook, last_resort
    logging.captureWarnings(False)
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_one_line_on_stderr_however_often_configured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("QUIRE_LOG_LEVEL", raising=False)
    configure_logging()
    configure_logging()
    logging.getLogger("quire.engine").info("loaded %d", 3)
    logging.getLogger("quire.engine").debug("hidden")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("INFO ")
    assert captured.err.endswith(" quire.engine: loaded 3\n")
    assert captured.err.count("\n") == 1


def test_level_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "error")
    configure_logging()
    logging.getLogger("quire").warning("hidden")
    logging.getLogger("quire").error("shown")
    assert "shown" in capsys.readouterr().err.splitlines()[0]


def test_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"QUIRE_LOG_LEVEL must be one of DEBUG, .*'LOUD'"):
        configure_logging()


def test_flags_go_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "error")
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "text")
    configure_logging("debug", "json")
    logging.getLogger("quire").debug("shown")
    assert json.loads(capsys.readouterr().err)["message"] == "shown"


def test_the_format_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "json")
    configure_logging()
    logging.getLogger("quire").warning("shown")
    assert json.loads(capsys.readouterr().err)["level"] == "WARNING"
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="QUIRE_LOG_FORMAT must be one of text, json, got 'xml'"):
        configure_logging()


def test_last_message_of_a_command_is_a_log_line_if_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("info", "text")
    say_error("Error: no such model")
    assert capsys.readouterr().err == "Error: no such model\n"
    configure_logging("info", "json")
    say_error("Error: no such model")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("CRITICAL", "Error: no such model")


STRAY = """
import logging, sys, warnings
from quire.logging_setup import configure_logging
configure_logging("info", "json")
logging.getLogger("some.package").warning("stray")
warnings.warn("deprecated")
raise ValueError("the end")
"""


def test_foreign_logs_and_the_final_traceback_are_json() -> None:
    done = subprocess.run([sys.executable, "-c", STRAY], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in lines] == ["some.package", "py.warnings", "quire"]
    assert lines[2]["exception"].endswith("ValueError: the end")
    assert done.returncode == 1


LOGS = """
import logging, sys
from quire.logging_setup import configure_logging, say
configure_logging()
log = logging.getLogger("quire.test")
for number in range(int(sys.argv[1])):
    log.info("line %d %s", number, "x" * 100)
say("said")
"""
"""More than a pipe holds; ends with code 0 if nothing of it raised."""


def logs(num_lines: int, **streams: int) -> subprocess.Popen[str]:
    env = {**os.environ, "QUIRE_LOG_LEVEL": "INFO"}
    return subprocess.Popen([sys.executable, "-c", LOGS, str(num_lines)], env=env, text=True, **streams)  # type: ignore[call-overload, no-any-return]


def test_reader_gets_all_lines_in_order() -> None:
    process = logs(3000, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "said\n")
    assert [int(line.split()[5]) for line in err.splitlines()] == list(range(3000))


@pytest.mark.item(53)
def test_unread_pipe_blocks_no_caller() -> None:
    process = logs(3000, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    started = time.monotonic()
    assert process.wait(60) == 0
    assert time.monotonic() - started < 30 + FLUSH_S
    assert process.stderr is not None
    process.stderr.close()


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = logs(3000, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait(60) == 0


@pytest.mark.item(53)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_no_error() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        assert logs(100, stdout=full, stderr=full).wait(60) == 0
    finally:
        os.close(full)


@pytest.mark.item(53)
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_are_no_error(closed: tuple[int, ...]) -> None:
    script = " ".join([f"{number}>&-" if number else "0<&-" for number in closed])
    command = f'"{sys.executable}" -c "$LOGS" 100 {script}'
    assert (
        subprocess.run(["sh", "-c", command], env={**os.environ, "LOGS": LOGS}, check=False).returncode == 0
    )


def test_lines_that_were_lost_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "__stderr__", stream)
        writer = StreamWriter("stderr")
        fails = True

        def write(number: int, data: bytes) -> int:
            if fails:
                raise OSError("no space left")
            return os.writev(number, [data])

        monkeypatch.setattr("quire.logging_setup.os.write", write)
        for text in ("a\n", "b\n"):
            writer.write(text)
        writer.flush()
        fails = False
        for text in ("c\n", "d\n"):
            writer.write(text)
        writer.flush()
    with open(reader, encoding="utf-8") as lines:
        assert lines.read() == "2 lines before this one could not be written\nc\nd\n"


def test_lost_lines_are_counted_since_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("info", "text")
    assert num_lost_lines() == 0

    def full(number: int, data: bytes) -> int:
        raise OSError("no space left")

    with open(os.devnull, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "__stderr__", stream)
        monkeypatch.setattr("quire.logging_setup.os.write", full)
        for expected in (1, 2):
            logging.getLogger("quire").warning("x")
            (handler,) = logging.getLogger("quire").handlers
            handler.flush()
            assert num_lost_lines() == expected
        monkeypatch.undo()


def test_a_bug_in_a_log_call_is_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    LogHandler().handle(logging.LogRecord("quire", logging.WARNING, "file.py", 7, "%d lines", ("no",), None))
    assert "this log line cannot be formatted: TypeError" in capsys.readouterr().err
