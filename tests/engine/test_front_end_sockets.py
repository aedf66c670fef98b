# SPDX-License-Identifier: Apache-2.0
"""Test of a core's messages: each front end gets its own outputs, and all get the prefix cache's changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from quire.engine.client import message_socket
from quire.engine.core_service import FrontEndSockets
from quire.engine.messages import CacheDelta, CoreMessage, EngineCoreOutputs

NEWS = CacheDelta(b"12345678", b"")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context[zmq.Socket[bytes]]()
    yield context
    context.destroy(linger=0)


def test_news_of_the_cache_are_for_all_front_ends(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    sockets = [context.socket(zmq.PULL) for _ in range(3)]
    for front_end, socket in enumerate(sockets):
        socket.bind(f"ipc://{tmp_path / message_socket(front_end)}")
    outboxes = FrontEndSockets(context, tmp_path)
    outboxes.open(1)
    outboxes.open(2)
    for news in (NEWS, None, NEWS):
        outboxes.send(EngineCoreOutputs([], None, 1.0, cache=news))
    for socket in sockets:
        for _ in range(2):
            assert socket.poll(5000), "nothing is told"
            message = msgspec.msgpack.decode(socket.recv(), type=CoreMessage)
            assert isinstance(message, EngineCoreOutputs)
            assert message.cache == NEWS
    assert not any(socket.poll(0) for socket in sockets)
    for front_end, socket in enumerate(sockets):
        outboxes.close(front_end)
        socket.close(0)
