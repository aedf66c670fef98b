"""`configure_logging`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quire.errors import ConfigError
from quire.logging_setup import configure_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    logger = logging.getLogger("quire")
    before = logger.level, logger.handlers[:]
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]


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
