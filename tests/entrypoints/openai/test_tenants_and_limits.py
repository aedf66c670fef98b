# SPDX-License-Identifier: Apache-2.0
"""Tests of a request's tenant and priority, and of the reply of a full queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.entrypoints.openai.keys import tenant_of_key
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

COMPLETION = ("/v1/completions", {"prompt": "hi"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
ROUTES = pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])


def fair_engine() -> FakeEngine:
    return FakeEngine(scheduling_policy="fair")


@ROUTES
async def test_without_keys_the_user_field_names_the_tenant(path: str, body: dict[str, Any]) -> None:
    engine = fair_engine()
    async with client_for(engine) as client:
        response = await client.post(path, json={**body, "user": "ann"})
        await client.post(path, json=body)
    assert engine.tenants == ["ann", ""]
    assert "x-quire-ignored-fields" not in response.headers


@ROUTES
async def test_key_names_the_tenant_and_the_user_field_is_ignored(path: str, body: dict[str, Any]) -> None:
    engine = fair_engine()
    async with client_for(engine, api_key=("one", "two")) as client:
        for key in ("two", "one"):
            headers = {"authorization": f"Bearer {key}"}
            response = await client.post(path, json={**body, "user": "ann"}, headers=headers)
            assert response.headers["x-quire-ignored-fields"] == "user"
    assert engine.tenants == [tenant_of_key(b"two"), tenant_of_key(b"one")]
    assert "two" not in engine.tenants[0]


async def test_a_tenant_has_a_name_of_bounded_length() -> None:
    async with client_for(fair_engine()) as client:
        response = await client.post(COMPLETION[0], json={**COMPLETION[1], "user": "x" * 257})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "user")


@ROUTES
@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
async def test_priority_is_honored_or_refused(path: str, body: dict[str, Any], policy: str) -> None:
    async with client_for(FakeEngine(scheduling_policy=policy)) as client:
        response = await client.post(path, json={**body, "priority": -3})
    if policy == "priority":
        assert response.status_code == 200
    else:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
        assert policy in response.json()["error"]["message"]


@pytest.mark.item(28)
@ROUTES
@pytest.mark.parametrize("stream", [False, True])
async def test_request_holds_a_place_from_tokenization_to_any_end(
    path: str, body: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = FakeEngine(), list[int]()
    encode = engine.tokenizer.encode  # type: ignore[union-attr]

    def watched(*args: Any, **kwargs: Any) -> list[int]:
        seen.append(len(engine.waiting))
        return encode(*args, **kwargs)

    monkeypatch.setattr(engine.tokenizer, "encode", watched)
    body = {**body, "n": 3, "stream": stream}
    async with client_for(engine) as client:
        for more, status in (({}, 200), ({"max_tokens": -1}, 400), ({"n": 10**9}, 400), ({"n": 0}, 400)):
            assert (await client.post(path, json={**body, **more})).status_code == status
            assert len(engine.waiting) == 0
        monkeypatch.setattr(engine.tokenizer, "encode", lambda *args, **kwargs: [10**9])
        assert (await client.post(path, json=body)).status_code == 400
    assert seen[0] == 3
    assert len(engine.waiting) == 0


@pytest.mark.item(28)
@ROUTES
@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_reported_before_tokenization(
    path: str, body: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.is_full = True
    must_not_run: Callable[..., Any] = lambda *args, **kwargs: pytest.fail("the prompt was tokenized")  # noqa: E731
    monkeypatch.setattr(engine.tokenizer, "encode", must_not_run)
    async with client_for(engine) as client:
        response = await client.post(path, json={**body, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert "7 sequences wait" in response.json()["error"]["message"]
