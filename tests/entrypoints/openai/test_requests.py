# SPDX-License-Identifier: Apache-2.0
"""Requests in flight, as operators see them; and the greeting page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from quire.config import DEMO_MODEL, EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.keys import MAX_ENDED, ClientIds
from quire.scheduler.explain import Explanation
from tests.engine.slow_schedulers import Slow
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture
async def admin(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine, admin_api_key="admin") as client:
        client.headers.update(ADMIN)
        yield client


async def started(client: httpx.AsyncClient, engine: FakeEngine) -> asyncio.Task[httpx.Response]:
    """A request with two prompts that does not end."""
    engine.hold_after = 1
    task = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "b"]}))
    while len(engine.running) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return task


async def test_any_id_of_a_request_explains_it(client: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
    ):
        answer = await client.post(path, json=body)
        for name in (answer.json()["id"], answer.headers["x-request-id"]):
            explained = (await client.get(f"/v1/requests/{name}/explain")).json()
            assert len(explained["sequences"]) == (2 if "prompt" in body else 1)
            assert explained["sequences"][0]["shares"][0]["cause"] == "next_step"
    assert (await client.get("/v1/requests/nothing/explain")).status_code == 404


async def test_explain_finds_requests_by_their_clients_id(client: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "mine"}
    for _ in range(2):
        answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.headers["x-request-id"] == "mine"
        assert "mine" not in answer.json()["id"]
    assert len((await client.get("/v1/requests/mine/explain")).json()["sequences"]) == 2


async def test_abort_finds_requests_by_their_clients_id(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    admin.headers["x-request-id"] = "mine"
    task = await started(admin, engine)
    assert (await admin.post("/abort_requests", json={"request_ids": ["mine"]})).json() == {"num_aborted": 2}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_client_ids_of_ended_requests_are_bounded() -> None:
    ids = ClientIds()
    with ids.used("long", "0"):
        for number in range(3 * MAX_ENDED):
            with ids.used(f"id-{number % (2 * MAX_ENDED)}", str(number)):
                pass
        assert len(ids._own) <= MAX_ENDED + 1
        assert ids.names_of("long") == ["long", "0"]
    assert ids.names_of(f"id-{MAX_ENDED - 1}") == [f"id-{MAX_ENDED - 1}", str(3 * MAX_ENDED - 1)]


@pytest.mark.item(21)
async def test_explain_of_another_tenants_request_is_a_404(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("a: {keys: [ka1, ka2]}\nb: {keys: [kb]}")
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL), in_process=True)
    await engine.wait_ready()
    async with client_for(engine, api_key_file=str(file), admin_api_key="admin") as client:  # type: ignore[arg-type]

        async def statuses(name: str) -> list[int]:
            keys = [{"authorization": f"Bearer {key}"} for key in ("ka1", "ka2", "kb", "admin")]
            return [
                (await client.get(f"/v1/requests/{name}/explain", headers=key)).status_code for key in keys
            ]

        headers = {"authorization": "Bearer ka1", "x-request-id": "mine"}
        body = {"prompt": ["Hi", "Ho"], "max_tokens": 2}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert await statuses(answer.json()["id"]) == [200, 200, 404, 200]
        assert await statuses("mine") == [200, 200, 404, 200]
    await engine.shutdown()


async def test_all_are_listed_and_counted(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    task = await started(admin, engine)
    listed = (await admin.get("/v1/requests")).json()
    assert (listed["num_requests"], [one["status"] for one in listed["data"]]) == (2, ["running"] * 2)
    assert (await admin.get("/load")).json() == {"server_load": 1}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await admin.get("/v1/requests")).json()["data"] == []


async def test_core_is_queried_for_all_requests_at_once(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    """It answers between steps, which may take long."""
    task = await started(admin, engine)
    explain, step = engine.explain, asyncio.Barrier(2)

    async def slow(request_id: str) -> list[Explanation]:
        found = await explain(request_id)
        async with asyncio.timeout(300):
            await step.wait()
        return found

    engine.explain = slow  # type: ignore[method-assign]
    (first, second) = (await admin.get("/v1/requests")).json()["data"]
    request_id = engine.labels()[0].removeprefix("cmpl-").rpartition("-")[0]
    explained = (await admin.get(f"/v1/requests/{request_id}/explain")).json()["sequences"]
    assert [one["request_id"] for one in explained] == [first["request_id"], second["request_id"]]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_or_all_are_aborted(admin: httpx.AsyncClient, engine: FakeEngine) -> None:
    task = await started(admin, engine)
    labels = engine.labels()
    request_id = labels[0].removeprefix("cmpl-").rpartition("-")[0]
    for body in ({"request_ids": [request_id, "x"]}, {"request_ids": [f"cmpl-{request_id}"]}, {}):
        engine.aborted.clear()
        assert (await admin.post("/abort_requests", json=body)).json() == {"num_aborted": 2}
        assert engine.aborted == labels
    assert (await admin.post("/abort_requests", json={"request_ids": ["x"]})).json() == {"num_aborted": 0}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_abort_reaches_the_core() -> None:
    slow = f"{Slow.__module__}:{Slow.__name__}"  # so that it comes before the end
    args = {"distributed_executor_backend": "null", "num_gpu_blocks_override": 200, "scheduler_cls": slow}
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args), in_process=True)
    async with client_for(engine, admin_api_key="admin") as client:  # type: ignore[arg-type]
        await engine.wait_ready()
        body = {"prompt": "hi", "max_tokens": 1900, "ignore_eos": True}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        while not engine.labels():  # noqa: ASYNC110
            await asyncio.sleep(0)
        (listed,) = (await client.get("/v1/requests", headers=ADMIN)).json()["data"]
        assert listed["request_id"].startswith("cmpl-")
        await client.post("/abort_requests", json={}, headers=ADMIN)
        assert "was aborted" in (await task).json()["error"]["message"]
        assert engine.labels() == []
    await engine.shutdown()


async def test_the_front_page_is_for_both(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.config = engine.config.evolve(served_model_name=("<b>fake</b>",))
    facts = (await client.get("/")).json()
    assert (facts["name"], facts["models"], facts["status"]) == ("quire", ["<b>fake</b>"], "ready")
    assert "POST /v1/chat/completions" in facts["endpoints"]
    async with client_for(engine, console=False) as plain:
        page = await plain.get("/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert "&lt;b&gt;fake" in page.text
    assert "<b>" not in page.text
    assert not re.search(r"https?:|<script|<link|<img", page.text)
    engine.is_ready = False
    assert (await client.get("/")).json()["status"].startswith("the model is loading")


async def test_models_by_any_spelling(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert (await client.get("/v1/models/")).json() == listed


async def test_tokenizer_info_is_opt_in(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/tokenizer_info")).status_code == 404
    async with client_for(engine, enable_tokenizer_info_endpoint=True) as open_client:
        info = (await open_client.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["vocab_size"]) == ("<|im_end|>", 258)
    assert "im_start" in info["chat_template"]
