# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()
