# SPDX-License-Identifier: Apache-2.0
"""One served included model for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.layers import states
from tests.end_to_end.server import Server
from tests.fixtures.thread_ranks import thread_ranks as thread_ranks
from tests.reliability.service import Baseline, Service


@pytest.fixture(autouse=True)
def states_in_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of some blocks leave states that others resume from."""
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", 16)


@pytest.fixture(scope="session")
def demo_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(log=tmp_path_factory.mktemp("server") / "log")
    service.baseline = Baseline(
        service, num_helpers=8
    )  # so many check constraints at a time at most, and stay
    yield service
    assert service.stop() == 0, service.process.log.read_text()


@pytest.fixture(scope="session")
def demo_server(demo_service: Service) -> Server:
    return demo_service.process


@pytest.fixture(autouse=True)
def _demo_server_is_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that talks to it, what docs/reliability.md promises is true of it."""
    if "demo_server" not in request.fixturenames:
        yield
        return
    service: Service = request.getfixturevalue("demo_service")
    yield
    service.baseline.check()
