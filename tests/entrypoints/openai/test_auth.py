# SPDX-License-Identifier: Apache-2.0
"""Every route that is registered needs the key, except the open list; the decision is made from the raw path."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.middleware.auth import OPEN_PATHS
from quire.entrypoints.openai.openapi.limits import ServerLimits
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

KEY = "secret-key"
NO_KEY = "this server needs an API key: Authorization: Bearer <key>"
AUTH_TYPES = ("AuthenticationError", "authentication_error")
EVERYTHING: dict[str, Any] = {"admin_api_key": "secret-key", "enable_tokenizer_info_endpoint": True}
BEARER = {"authorization": f"Bearer {KEY}"}


def registered(app: Any) -> set[tuple[str, str]]:
    """(method, path) of everything the app serves, from its own document."""
    paths = app.state.document.under(ServerLimits.from_server(app.state.server))["paths"]
    return {(method, path) for path, methods in paths.items() for method in methods}


@pytest.mark.item(23)
async def test_every_route_needs_the_key(engine: FakeEngine) -> None:
    routes = registered(build_app(engine, ServerConfig(**EVERYTHING)))  # type: ignore[arg-type]
    assert {path for _, path in routes} >= OPEN_PATHS | {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/metrics", "/version",
        "/openapi.json", "/docs",
        "/reset_prefix_cache", "/v1/responses", "/v1/messages", "/api/chat", "/v1/requests", "/tokenizer_info", "/",
    }  # fmt: skip
    async with client_for(engine, api_key=(KEY,), **EVERYTHING) as client:
        for method, path in routes:
            without = await client.request(method, path)
            wrong = await client.request(method, path, headers={"authorization": "Bearer wrong"})
            right = await client.request(method, path, headers=BEARER)
            assert right.status_code != 401, path
            if path in OPEN_PATHS:
                assert without.status_code == wrong.status_code == 200, path
            else:
                assert without.status_code == wrong.status_code == 401, path
                error = without.json()["error"]  # Ollama's is a sentence
                assert error == NO_KEY if path.startswith("/api/") else error["type"] in AUTH_TYPES


@pytest.mark.item(9, 23)
@folded(
    ("path", "headers"),
    [
        ("/nowhere", {}),
        ("//health", {}),
        ("/health/", {}),
        ("/health/../v1/models", {}),
        ("/HEALTH", {}),
        ("/v1/models", {"host": "x/health?"}),
        ("/v1/models?/health", {}),
        ("/v1/models", {"authorization": KEY}),
        ("/v1/models", {"authorization": f"Basic {KEY}"}),
        ("/v1/models", {"authorization": "Bearer"}),
        ("/v1/models", {"authorization": f"Bearer {KEY}x"}),
        ("/v1/models", {"authorization": "Bearer \xe9"}),
        ("/v1/models", {"x-api-key": f"{KEY}x"}),
        ("/v1/models", {"x-api-key": f"Bearer {KEY}"}),
        ("/v1/models", {"x-api-key": KEY, "authorization": "Bearer wrong"}),
    ],
)
async def test_refused(engine: FakeEngine, path: str, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with client_for(engine, api_key=(KEY,)) as client:
        assert (await client.get(path, headers=raw)).status_code == 401


async def test_two_authorization_headers_are_refused(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=(KEY,)) as client:
        headers = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
        assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_any_of_several_keys(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("one", "two")) as client:
        for key in ("one", "two"):
            assert (
                await client.get("/v1/models", headers={"authorization": f"bearer {key}"})
            ).status_code == 200


async def test_the_key_may_come_as_anthropic_clients_send_it(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=(KEY,)) as client:
        assert (await client.get("/v1/models", headers={"x-api-key": KEY})).status_code == 200
        twice = [("x-api-key", KEY), ("x-api-key", KEY)]
        assert (await client.get("/v1/models", headers=twice)).status_code == 401


async def test_metrics_can_be_opened_to_a_scraper_that_has_no_key(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=(KEY,), allow_unauthenticated_metrics=True) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/version")).status_code == 401


async def test_key_from_environment(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    async with client_for(engine) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers=BEARER)).status_code == 200


async def test_authentication_comes_before_everything_else(engine: FakeEngine) -> None:
    engine.is_ready = False
    async with client_for(engine, api_key=(KEY,), max_request_bytes=1024) as client:
        response = await client.post("/v1/completions", content=b"x" * 5000)
        assert response.status_code == 401


async def test_cors_preflight_needs_no_key(engine: FakeEngine) -> None:
    preflight = {"origin": "http://a.test", "access-control-request-method": "POST"}
    async with client_for(engine, api_key=(KEY,), allowed_origins=("http://a.test",)) as client:
        response: httpx.Response = await client.options("/v1/completions", headers=preflight)
        assert response.headers["access-control-allow-origin"] == "http://a.test"
        foreign = await client.options("/v1/completions", headers={**preflight, "origin": "http://b.test"})
        assert "access-control-allow-origin" not in foreign.headers


async def test_root_path(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=(KEY,), root_path="/llm") as client:
        assert (await client.get("/llm/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 200


@pytest.mark.item(21, 23)
async def test_the_controls_answer_to_the_admin_key_alone(engine: FakeEngine) -> None:
    admin = {"authorization": "Bearer admin"}
    async with client_for(engine, api_key=(KEY,), admin_api_key="admin") as client:
        assert (await client.get("/v1/requests", headers=BEARER)).status_code == 401
        assert (await client.get("/v1/requests", headers={"x-api-key": KEY})).status_code == 401
        assert (await client.get("/v1/requests", headers=admin)).status_code == 200
        assert (await client.get("/v1/requests", headers={"x-api-key": "admin"})).status_code == 200
        assert (await client.get("/v1/models", headers=admin)).status_code == 200
    async with client_for(engine, admin_api_key="admin") as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/requests")).status_code == 401
    async with client_for(engine) as client:
        assert (await client.get("/v1/requests", headers=admin)).status_code == 404
