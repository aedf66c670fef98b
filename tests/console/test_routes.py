# SPDX-License-Identifier: Apache-2.0
"""Frames over HTTP, for the admin key alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from quire.config import DEMO_MODEL, EngineConfig
from quire.console import routes
from quire.engine.async_llm import AsyncLLM
from tests.engine.slow_schedulers import Slow
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

ADMIN = {"authorization": "Bearer admin"}
BODY = {"prompt": "hello " * 30, "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture
async def engine() -> AsyncIterator[AsyncLLM]:
    args = {
        "distributed_executor_backend": "null",
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 2,
        "scheduler_cls": f"{Slow.__module__}:{Slow.__name__}",
    }
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args), in_process=True)
    await engine.wait_ready()
    yield engine
    await engine.shutdown()


@pytest.fixture
async def client(engine: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine, admin_api_key="admin", api_key=("key",)) as client:  # type: ignore[arg-type]
        client.headers.update(ADMIN)
        yield client


async def test_frame_shows_requests_and_steps(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A frame for each query, so that no state lies between two frames.
    monkeypatch.setattr("quire.console.recorder.MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr("quire.console.recorder.MOST_OF_TIME", math.inf)
    tasks = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(3)]
    wanted = [("running", None), ("running", None), ("waiting", "sequence_cap")]
    found: list[tuple[str, str | None]] = []
    frame: dict[str, Any] = {}
    async with asyncio.timeout(60):  # the requests start one after the other
        while found != wanted or not frame["steps"]:
            (frame,) = (await client.get("/console/frame")).json()["cores"]
            found = [
                (row["status"], row["cause"] if row["status"] == "waiting" else None)
                for row in frame["requests"]
            ]
    waiting = frame["requests"][2]
    assert sum(share["duration_ns"] for share in waiting["shares"]) > 0
    assert "hello" not in str(frame), "prompts are nobody's business"
    last = frame["steps"][-1]["step_id"]
    (later,) = (await client.get(f"/console/frame?after={last}")).json()["cores"]
    assert all(step["step_id"] > last for step in later["steps"])
    held = (await client.get("/console/block?id=1")).json()
    assert held["num_holders"] == len(held["holders"]) > 0
    await client.post("/abort_requests", json={})
    await asyncio.gather(*tasks)


async def test_routes_need_the_admin_key(client: httpx.AsyncClient) -> None:
    for path in ("/console/frame", "/console/block?id=1"):
        assert (await client.get(path, headers={"authorization": "Bearer key"})).status_code == 401
        assert (await client.get(path, headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await client.get(path)).status_code == 200


async def test_routes_are_absent_without_an_admin_key(engine: AsyncLLM) -> None:
    async with client_for(engine) as client:  # type: ignore[arg-type]
        assert (await client.get("/console/frame")).status_code == 404


@folded(
    ("query", "status"),
    [
        ("frame?after=x", 400), ("frame?after=-1", 400), ("frame?after=99999999999999999999", 400),
        ("frame?after=\u0661", 400), ("frame?after=9007199254740992&after=1", 200), ("block", 404), ("block?id=0", 404),
        ("block?id=200", 404), ("block?id=1&core=1", 404), ("block?id=1&tier=host", 404), ("block?id=1&tier=disk", 400),
        ("block?id=1.5", 400),
    ],
)  # fmt: skip
async def test_malformed_query_is_refused(client: httpx.AsyncClient, query: str, status: int) -> None:
    response = await client.get(f"/console/{query}")
    assert response.status_code == status
    assert (await client.get("/console/frame")).status_code == 200


async def test_core_that_does_not_answer_is_unavailable(
    client: httpx.AsyncClient, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(routes, "PATIENCE_S", 0.01)
    monkeypatch.setattr(engine, "call_cores", never)
    response = await client.get("/console/frame")
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
