"""Notifications for systemd: what is sent when, and managers that are gone."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.entrypoints.openai.service_manager import ServiceManager
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import live_server


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A manager's socket and the value of $NOTIFY_SOCKET."""
    name = f"quire-test-{os.getpid()}-{tmp_path.name}" if request.param == "abstract" else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name if request.param == "abstract" else name)
        receiver.settimeout(30)
        yield receiver, "@" + name if request.param == "abstract" else name


def test_adopted_manager_gets_ready_and_stopping(manager: tuple[socket.socket, str]) -> None:
    receiver, address = manager
    environment = {"NOTIFY_SOCKET": address, "OTHER": "kept"}
    adopted = ServiceManager.adopt(environment)
    assert environment == {"OTHER": "kept"}
    adopted.ready("serving\na model")
    assert receiver.recv(1000) == b"READY=1\nSTATUS=serving a model"
    adopted.stopping("draining")
    assert receiver.recv(1000) == b"STOPPING=1\nSTATUS=draining"


@pytest.mark.parametrize("address", ["", "/nowhere/socket", "@no-such-socket", "relative", "x" * 200])
def test_absent_manager_fails_nothing(address: str) -> None:
    adopted = ServiceManager.adopt({"NOTIFY_SOCKET": address})
    adopted.ready("serving")
    adopted.stopping("draining")


def test_full_queue_of_manager_delays_nothing(manager: tuple[socket.socket, str]) -> None:
    adopted = ServiceManager(manager[1])
    for _ in range(1000):
        adopted.ready("serving")


@pytest.mark.parametrize(
    ("variables", "sends"),
    [
        ({"WATCHDOG_USEC": "20000"}, True),
        ({"WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
async def test_watchdog_is_kept_alive_if_asked(
    manager: tuple[socket.socket, str], variables: dict[str, str], sends: bool
) -> None:
    receiver, address = manager
    adopted = ServiceManager.adopt({"NOTIFY_SOCKET": address, **variables})
    keeping = asyncio.create_task(adopted.keep_alive(lambda: True))
    if sends:
        for _ in range(2):
            assert await asyncio.to_thread(receiver.recv, 1000) == b"WATCHDOG=1"
        keeping.cancel()
    else:
        await keeping


async def test_server_that_hangs_sends_no_keep_alive(manager: tuple[socket.socket, str]) -> None:
    receiver, address = manager
    states = iter([True, False, False, True])
    beats: list[bool] = []

    def is_alive() -> bool:
        beats.append(next(states, True))
        return beats[-1]

    keeping = asyncio.create_task(ServiceManager(address, 0.01).keep_alive(is_alive))
    for _ in range(2):
        await asyncio.to_thread(receiver.recv, 1000)
    keeping.cancel()
    assert beats[:4] == [True, False, False, True]


async def test_live_server_reports_ready_and_stopping(
    engine: FakeEngine, manager: tuple[socket.socket, str]
) -> None:
    receiver, address = manager
    async with live_server(engine, service_manager=ServiceManager(address)) as server:
        assert (await asyncio.to_thread(receiver.recv, 1000)).startswith(b"READY=1\nSTATUS=serving ")
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/readyz")).status_code == 200
        server.lifecycle.on_signal()
        assert (await asyncio.to_thread(receiver.recv, 1000)).startswith(b"STOPPING=1")
        assert await server.code() == 0
