# SPDX-License-Identifier: Apache-2.0
"""The routes that put the server to sleep, and what clients and probes see meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from quire.config import DEMO_MODEL, EngineConfig
from quire.engine.async_llm import AsyncLLM
from tests.engine.slow_schedulers import Slow
from tests.entrypoints.openai.serving import LiveServer, client_for, events
from tests.fixtures.quick import quick

BODY = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True, "seed": 1}
ADMIN = {"authorization": "Bearer admin"}


def started() -> AsyncLLM:
    args = {
        "distributed_executor_backend": "null",
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 4,
        "scheduler_cls": f"{Slow.__module__}:{Slow.__name__}",  # so that who runs is seen running
    }
    return AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args), in_process=True)


@pytest.fixture
async def served() -> AsyncIterator[httpx.AsyncClient]:
    engine = started()
    async with client_for(engine, admin_api_key="admin") as client:  # type: ignore[arg-type]
        client.headers.update(ADMIN)
        await engine.wait_ready()
        yield client
    await engine.shutdown()


def text_of(response: httpx.Response) -> str:
    return "".join(choice["text"] for event in events(response.text)[:-1] for choice in event["choices"])


async def asleep(client: httpx.AsyncClient) -> Any:
    return (await client.get("/is_sleeping")).json()


async def test_sleeping_server_is_alive_and_refuses_requests(served: httpx.AsyncClient) -> None:
    expected = (await served.post("/v1/completions", json=BODY)).json()["choices"]
    for level in (0, 1, 2):
        assert (await served.post(f"/sleep?level={level}")).json()["is_sleeping"] is True
        assert (await asleep(served))["is_sleeping"] is True
        response = await served.post("/v1/completions", json=BODY)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert "asleep" in response.json()["error"]["message"]
        for probe, status in {"/readyz": 503, "/health": 503, "/livez": 200}.items():
            assert (await served.get(probe)).status_code == status, probe
        assert (await served.post("/wake_up")).json() == {"is_sleeping": False, "asleep": []}
        assert (await served.get("/readyz")).status_code == 200
        assert (await served.post("/v1/completions", json=BODY)).json()["choices"] == expected


async def test_default_sleep_is_level_1_and_aborts_requests(served: httpx.AsyncClient) -> None:
    running = asyncio.create_task(served.post("/v1/completions", json={**BODY, "max_tokens": 600}))
    while not (await served.get("/v1/requests")).json()["data"]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (await served.post("/sleep")).json()["asleep"] == ["kv_cache", "scheduling", "weights"]
    assert (await running).status_code >= 400
    assert (await served.get("/v1/requests")).json()["data"] == []


async def test_parts_wake_by_tags(served: httpx.AsyncClient) -> None:
    await served.post("/sleep?level=2")
    for early in ("kv_cache", "scheduling"):
        response = await served.post(f"/wake_up?tags={early}")
        assert (response.status_code, response.json()["error"]["type"]) == (409, "ConflictError")
    assert (await served.post("/wake_up?tags=weights")).json()["asleep"] == ["kv_cache", "scheduling"]
    assert (await served.post("/wake_up?tags=weights&tags=kv_cache")).json()["asleep"] == []
    assert (await served.post("/wake_up")).status_code == 200


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=one", "level"),
        ("/sleep?level=", "level"),
        ("/sleep?mode=drop", "mode"),
        ("/sleep?levle=1", "levle"),
        ("/wake_up?tags=kv", "tags"),
        ("/wake_up?tag=weights", "tag"),
    ],
)
async def test_invalid_sleep_request_is_refused_without_effect(
    call: str, param: str, served: httpx.AsyncClient
) -> None:
    response = await served.post(call)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert await asleep(served) == {"is_sleeping": False, "asleep": []}


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]
)
async def test_only_the_admin_key_opens_them(method: str, path: str, served: httpx.AsyncClient) -> None:
    del served.headers["authorization"]
    assert (await served.request(method, path)).status_code == 401


async def test_a_stream_that_is_kept_pauses_and_goes_on(served: httpx.AsyncClient) -> None:
    body = {**BODY, "max_tokens": 200, "stream": True}
    expected = text_of(await served.post("/v1/completions", json=body))
    running = asyncio.create_task(served.post("/v1/completions", json=body))
    while not (await served.get("/v1/requests")).json()["data"]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (await served.post("/sleep?level=2&mode=keep")).status_code == 200
    assert not running.done()
    (kept,) = (await served.get("/v1/requests")).json()["data"]
    assert kept["cause"] == "asleep"
    await served.post("/wake_up")
    assert text_of(await running) == expected


@pytest.mark.parametrize("mode", quick(["abort", "keep"], ["keep"]))
async def test_a_signal_ends_a_server_that_sleeps(mode: str) -> None:
    """At once if nothing is in flight; what was kept has the patience that everybody has."""
    engine = started()
    server = LiveServer(engine, admin_api_key="admin", shutdown_timeout=0.5)  # type: ignore[arg-type]
    await engine.wait_ready()
    async with httpx.AsyncClient(base_url=server.url, headers=ADMIN, timeout=60) as client:
        running = asyncio.create_task(client.post("/v1/completions", json={**BODY, "max_tokens": 600}))
        while not (await client.get("/v1/requests")).json()["data"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await client.post(f"/sleep?mode={mode}")
        server.lifecycle.on_signal()
        assert (await running).status_code >= 400
        assert await server.code() == 0
    await engine.shutdown()
