# SPDX-License-Identifier: Apache-2.0
"""Log settings, which commands change, are restored after each test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _log_settings() -> Iterator[None]:
    logger = logging.getLogger("quire")
    before = logger.level, logger.handlers[:]
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]
