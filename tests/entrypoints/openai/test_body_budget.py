# SPDX-License-Identifier: Apache-2.0
"""Bodies that come in are bounded in sum, decoded or not, and cost neither small requests nor the event loop much."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.openai import parsing
from quire.entrypoints.openai.middleware.body_limit import SMALL_BYTES, BodyBudget, HeldBody
from quire.errors import UnavailableError
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import LiveServer, live_server

MIB = 2**20
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n"
)
GZIP = b"Content-Encoding: gzip\r\n"


@given(steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3 * SMALL_BYTES)), max_size=60))
def test_budget_is_never_exceeded_and_given_back(steps: list[tuple[int, int]]) -> None:
    budget = BodyBudget(10 * SMALL_BYTES)
    bodies = [HeldBody(budget) for _ in range(10)]
    for number, size in steps:
        try:
            bodies[number].take(size)
        except UnavailableError:
            bodies[number].release()
        assert 0 <= budget.held_bytes <= 10 * SMALL_BYTES
    for body in bodies:
        with body:
            pass
    assert budget.held_bytes == 0


def test_budget_leaves_room_for_small_bodies() -> None:
    budget = BodyBudget(8 * SMALL_BYTES)
    large, small = HeldBody(budget), HeldBody(budget)
    large.take(6 * SMALL_BYTES)
    with pytest.raises(UnavailableError, match="--max-receiving-bytes"):
        large.take(1)
    small.take(SMALL_BYTES)


class Watched(BodyBudget):
    """Remembers the most that it has held."""

    made: list[Watched]

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.most = 0
        Watched.made.append(self)

    def take(self, num_bytes: int, *, is_small: bool) -> None:
        super().take(num_bytes, is_small=is_small)
        self.most = max(self.most, self.held_bytes)


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    Watched.made = []
    monkeypatch.setattr("quire.entrypoints.openai.app.BodyBudget", Watched)
    return Watched.made


async def begin(
    server: LiveServer, head: bytes, piece: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.getsockname()[1])
    writer.write(head + b"\r\n%x\r\n" % len(piece) + piece + b"\r\n")
    await writer.drain()
    return reader, writer


def unfinished(num_bytes: int) -> bytes:
    """Some KiB that become so many bytes, and that no gzip body ends with."""
    return gzip.compress(b'{"prompt": "' + b"a" * num_bytes)[:-8]


@pytest.mark.item(8)
@pytest.mark.parametrize("is_gzip", [True, False])
async def test_unfinished_bodies_are_bounded_in_sum(is_gzip: bool, budgets: list[Watched]) -> None:
    size = 900_000
    head, piece = (HEAD + GZIP, unfinished(size)) if is_gzip else (HEAD, b" " * size)
    options = {"max_request_bytes": MIB, "max_receiving_bytes": 8 * MIB}
    async with (
        live_server(FakeEngine(), **options) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        begun = [await begin(server, head, piece) for _ in range(100)]
        waiting = {asyncio.create_task(reader.read(12)) for reader, _ in begun}
        refused = 0
        while refused < 100 - 8:  # as many as there is no room for are answered without their end
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=30)
            assert done, "those beyond the budget wait"
            assert {task.result() for task in done} == {b"HTTP/1.1 503"}
            refused += len(done)
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        assert budgets[0].most <= 8 * MIB
        for _, writer in begun:
            writer.close()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        while budgets[0].held_bytes:  # until the server has seen that they are gone
            await client.get("/health")
        whole = {"prompt": "hi", "user": "u" * size}
        assert (await client.post("/v1/completions", json=whole)).status_code == 200
        assert budgets[0].held_bytes == 0


async def test_refusal_by_the_budget_has_retry_after() -> None:
    options = {"max_request_bytes": MIB, "max_receiving_bytes": 2 * MIB}
    async with live_server(FakeEngine(), **options) as server:
        first = await begin(server, HEAD, b" " * (MIB - 1000))
        second = await begin(server, HEAD, b" " * (MIB - 1000))
        done, _ = await asyncio.wait(
            [asyncio.create_task(one[0].readuntil(b"}}")) for one in (first, second)],
            return_when=asyncio.FIRST_COMPLETED,
            timeout=30,
        )
        (answer,) = (task.result() for task in done)
        for _, writer in (first, second):
            writer.close()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 2" in answer.lower()
    assert b"--max-receiving-bytes" in answer


async def test_gzip_body_that_grows_too_much_is_refused_before_its_end() -> None:
    async with live_server(FakeEngine()) as server:
        reader, writer = await begin(server, HEAD + GZIP, unfinished(15 * MIB))
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100 times" in answer


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"logit_bias": {str(number): 1 for number in range(66_000)}}, 400),
        ({f"field{number}": 1 for number in range(66_000)}, 400),
        ({"logit_bias": {str(number): 1 for number in range(65_000)}}, 400),  # no token of this model
        ({"prompt": [1] * 300_000}, 400),  # longer than the context, and not than a body
        ({"prompt": [[1, 2]] * 1024}, 200),
    ],
    ids=["bias", "unknown", "bias of no token", "ids", "lists"],
)
async def test_large_body_is_checked_beside_the_loop(
    fields: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    check = parsing._checked

    def seen(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return check(*args)

    monkeypatch.setattr(parsing, "_checked", seen)
    body = json.dumps({"prompt": "hi", **fields, "user": "u" * SMALL_BYTES})
    async with live_server(FakeEngine()) as server, httpx.AsyncClient(base_url=server.url) as client:
        reply = await client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=60
        )
    assert reply.status_code == status, reply.text
    assert threading.get_ident() not in threads
