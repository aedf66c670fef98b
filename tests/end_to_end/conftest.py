"""One served model in the box for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.layers import states
from tests.end_to_end.server import Server


@pytest.fixture(autouse=True)
def states_in_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of some blocks leave states that others resume from."""
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", 16)


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(log=tmp_path_factory.mktemp("server") / "log").wait_ready()
    yield server
    assert server.stop() == 0, server.log.read_text()
