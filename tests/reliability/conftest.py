# SPDX-License-Identifier: Apache-2.0
"""One server for all tests of this folder that may share it, and a look at it after each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reliability.service import Service


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(log=tmp_path_factory.mktemp("reliability") / "log")
    yield service
    assert service.stop() == 0, service.process.log.read_text()


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """The shared server, which must be afterwards what it was before."""
    yield shared_service
    shared_service.baseline.check()
