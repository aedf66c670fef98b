# SPDX-License-Identifier: Apache-2.0
"""The prefix cache as clients see it: hits, whose they are, and the route that forgets them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from quire.batch.client import AppClient
from quire.config import DEMO_MODEL, EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app, routers
from quire.entrypoints.openai.openapi.operation import operation_of
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

TEXT = "What is the capital of France? " * 8
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
}
MESSAGES = BODIES["/v1/chat/completions"]["messages"]
TURN_2 = [*MESSAGES, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"}]
EVERY_ROUTE: dict[str, dict[str, Any]] = {
    **BODIES,
    "/v1/responses": {"input": TURN_2, "max_output_tokens": 2},
    "/v1/messages": {"messages": TURN_2, "max_tokens": 2},
    "/api/chat": {
        "model": "quire-demo",
        "messages": MESSAGES,
        "stream": False,
        "options": {"num_predict": 2},
    },
    "/api/generate": {"model": "quire-demo", "prompt": TEXT, "stream": False, "options": {"num_predict": 2}},
    "/completion": {"prompt": TEXT, "n_predict": 2},
}
"""Bodies of the routes that generate; Ollama's and llama-server's have no salt of their own."""
OTHERS = {"/infill", "/api/pull"}
"""Routes with streams that need a model made for it, and that generate nothing; /infill is answered as /completion."""


def cached_of(reply: dict[str, Any]) -> int:
    """As each API tells it."""
    if "timings" in reply and "tokens_cached" in reply:
        return int(reply["timings"]["cache_n"])
    usage = reply["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int(usage.get("prompt_tokens_details", usage.get("input_tokens_details"))["cached_tokens"])


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.more)], ids=["in process", "other process"]
)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """The whole server but for its socket and its model's arithmetic."""
    args = {"distributed_executor_backend": "null", "num_gpu_blocks_override": 200, "max_num_seqs": 4}
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args), in_process=request.param)
    async with client_for(engine, admin_api_key="admin") as client:  # type: ignore[arg-type]
        client.headers["authorization"] = "Bearer admin"
        await engine.wait_ready()
        yield client
    await engine.shutdown()


async def num_cached(client: httpx.AsyncClient, path: str, **fields: Any) -> int:
    usage = (await client.post(path, json=BODIES[path] | fields)).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    # A last block is never a hit: the token from which to sample is computed.
    assert cached in (0, (usage["prompt_tokens"] - 1) // 16 * 16)
    return int(cached)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"quire:{name}_total"))


@pytest.mark.item(22)
async def test_salts_share_with_themselves_only_on_every_route(served: httpx.AsyncClient) -> None:
    salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    for path, salt in itertools.product(BODIES, salts):
        assert await num_cached(served, path, **salt) == 0, (path, salt)
    for path, salt in itertools.product(BODIES, salts):
        assert await num_cached(served, path, **salt) > 0, (path, salt)
    for path in BODIES:
        assert await num_cached(served, path, cache_salt="c") == 0


@pytest.mark.item(22)
@pytest.mark.parametrize("kind", ["salt", "key"])
async def test_salts_and_keys_separate_caches_on_every_route(kind: str) -> None:
    args = {"distributed_executor_backend": "null", "num_gpu_blocks_override": 400, "max_num_seqs": 4}
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args), in_process=True)
    await engine.wait_ready()
    keys = ("a", "b") if kind == "key" else ()
    app = build_app(engine, ServerConfig(api_key=keys))
    generating = {
        route.path
        for router in routers(ServerConfig(), EngineConfig())
        for route in router.routes
        if takes(route)
    }
    assert generating - OTHERS == EVERY_ROUTE.keys(), "a route that generates is not tested"
    routes = {
        path: body
        for path, body in EVERY_ROUTE.items()
        if keys or not path.startswith(("/api", "/completion"))
    }

    async def cached(path: str, who: str) -> int:
        salt = {} if keys else {"cache_salt": f"{who}{path}"}
        reply = await client.post(path, json=routes[path] | salt, headers={"x-api-key": who} if keys else {})
        assert reply.status_code == 200, reply.text
        return cached_of(reply.json())

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire") as client:
        for path in routes:
            await engine.reset_prefix_cache()  # some have the same prompt, and a key is the same on all
            assert await cached(path, "a") == 0, path
            assert await cached(path, "b") == 0, path
            assert await cached(path, "a") > 0, path
            assert await cached(path, "b") > 0, path
    await engine.shutdown()


def takes(route: Any) -> bool:
    operation = operation_of(route.endpoint)
    return operation is not None and operation.stream is not None


@pytest.mark.item(22)
async def test_salts_share_with_themselves_only_in_a_batch(served: httpx.AsyncClient) -> None:
    app = served._app  # type: ignore[attr-defined]
    client = AppClient(app)
    answers = [
        await client.ask(path, msgspec.json.encode({**body, "cache_salt": f"{salt}{path}"}))
        for salt in ("a", "b", "a")
        for path, body in BODIES.items()
    ]
    found = [cached_of(msgspec.json.decode(answer.body)) for answer in answers]
    assert found[:4] == [0] * 4
    assert min(found[4:]) > 0


async def test_hits_are_counted(served: httpx.AsyncClient) -> None:
    hits = [await num_cached(served, "/v1/completions") for _ in range(3)]
    assert hits[0] == 0 < hits[1] == hits[2]
    assert (
        await metric(served, "prefix_cache_hits") == sum(hits) == await metric(served, "prompt_tokens_cached")
    )
    queries = await metric(served, "prefix_cache_queries")
    assert queries == await metric(served, "prompt_tokens") > sum(hits)


async def test_a_prompt_counts_once_however_many_completions_it_has(served: httpx.AsyncClient) -> None:
    usages = [
        (await served.post("/v1/completions", json=BODIES["/v1/completions"] | {"n": n})).json()["usage"]
        for n in (3, 2)
    ]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert await metric(served, "prompt_tokens") == sum(usage["prompt_tokens"] for usage in usages)
    assert await metric(served, "prompt_tokens_cached") == sum(cached) > 0


async def test_the_cache_is_forgotten(served: httpx.AsyncClient) -> None:
    for _ in range(2):
        assert await num_cached(served, "/v1/completions") == 0
        assert await num_cached(served, "/v1/completions") > 0
        response = await served.post("/reset_prefix_cache")
        assert (response.status_code, response.json()) == (200, {"reset": True})


async def test_nothing_is_forgotten_while_a_request_runs(engine: FakeEngine) -> None:
    engine.hold_after = 1
    async with client_for(engine, admin_api_key="admin") as client:
        client.headers["authorization"] = "Bearer admin"
        running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
        while not engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        response = await client.post("/reset_prefix_cache")
        assert response.status_code == 409
        assert response.json()["error"]["type"] == "ConflictError"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (await client.post("/reset_prefix_cache")).status_code == 200


async def test_options_are_not_ignored(engine: FakeEngine) -> None:
    async with client_for(engine, admin_api_key="admin") as client:
        client.headers["authorization"] = "Bearer admin"
        response = await client.post("/reset_prefix_cache?reset_running_requests=true")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reset_running_requests"


async def test_without_an_admin_key_there_is_no_route(client: httpx.AsyncClient) -> None:
    assert (await client.post("/reset_prefix_cache")).status_code == 404
