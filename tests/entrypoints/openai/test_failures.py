# SPDX-License-Identifier: Apache-2.0
"""Tests of the errors that clients receive when the engine fails; every stream has exactly one end."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import stream

BODIES = {
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 2},
}


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_core_dies_mid_stream(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.die_after = 3
    received = await stream(client, path, **body)
    assert [event for event in received if "error" in event] == [received[-1]]
    error = received[-1]["error"]
    assert error["code"] == 503
    assert "home" not in error["message"]
    assert all(choice["finish_reason"] is None for event in received[:-1] for choice in event["choices"])
    assert not engine.running


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_core_dies_before_the_first_token(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.die_after = 0
    for streamed in (False, True):
        response = await client.post(path, json={**body, "stream": streamed})
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert response.json()["error"]["code"] == 503


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_request_fails_in_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.fail_after = 2
    received = await stream(client, path, **body)
    assert received[-1]["error"]["code"] == 500
    assert sum("error" in event for event in received) == 1
    assert (await client.post(path, json=body)).status_code == 500


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_refusal_by_the_core_is_a_client_error(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.refusal = "adapter 'a': adapter_config.json: no such file"
    for streamed in (False, True):
        response = await client.post(path, json={**body, "stream": streamed})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == engine.refusal


async def test_unavailable_until_ready(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_ready = False
    for path in ("/health", "/readyz", "/ping", "/v1/models"):
        response = await client.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "loading" in response.json()["error"]["message"]
    for path in ("/livez", "/version", "/metrics"):
        assert (await client.get(path)).status_code == 200
    assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 503
    engine.is_ready = True
    for path in ("/health", "/readyz", "/livez", "/ping"):
        response = await client.get(path)
        assert (response.status_code, response.text) == (200, "")
    engine.die()
    for path in ("/health", "/readyz", "/livez"):
        assert (await client.get(path)).status_code == 503


@pytest.mark.item(44)
async def test_a_core_that_stands_still_is_not_alive(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.stalls, engine.is_ready = True, False
    for path in ("/health", "/readyz", "/livez"):
        assert (await client.get(path)).status_code == 503
    engine.stalls, engine.is_ready = False, True
    for path in ("/health", "/readyz", "/livez"):
        assert (await client.get(path)).status_code == 200


@pytest.mark.item(44)
async def test_nearly_full_queue_is_not_ready_but_serves(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_crowded = True
    for path, status in (("/health", 503), ("/readyz", 503), ("/ping", 503), ("/livez", 200)):
        response = await client.get(path)
        assert response.status_code == status
        assert ("nearly full" in response.text) == (status == 503)
    assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
