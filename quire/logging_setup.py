"""Where quire's log lines go: stderr, one short line each, so that stdout holds results only.

Invariant: importing quire configures no logging; only a command of ours calls `configure_logging`.
"""

from __future__ import annotations

import logging
import os
import sys

from quire.errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"


class _StderrHandler(logging.Handler):
    """Writes to the `sys.stderr` of the moment, which a progress bar or a test may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def configure_logging() -> None:
    """Send the log of the `quire` package to stderr at the level of QUIRE_LOG_LEVEL (default INFO).

    Raises:
        ConfigError: the level has no such name.
    """
    level = os.environ.get("QUIRE_LOG_LEVEL", "INFO").upper()
    if level not in LEVELS:
        raise ConfigError(f"QUIRE_LOG_LEVEL must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    logger = logging.getLogger("quire")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
