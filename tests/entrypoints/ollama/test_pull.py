# SPDX-License-Identifier: Apache-2.0
"""/api/pull and /api/delete: what the operator allows, progress, and what is left of a cut download."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.model_cache.cache import cached_models
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.hub import hub_of

FILES = {"config.json": b"{}", "model.safetensors": bytes(300_000), "notes.md": b"not wanted"}
MODELS = {"some/floats": FILES, "some/ggufs": {"a-Q4_K_M.gguf": bytes(5000), "a-Q8_0.gguf": bytes(9000)}}
ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hub_of(MODELS) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(download_dir=str(tmp_path / "hub"))


async def pulled(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post("/api/pull", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def refused(client: httpx.AsyncClient, path: str, status: int, **body: Any) -> str:
    response = await client.request("POST" if path == "/api/pull" else "DELETE", path, json=body)
    assert response.status_code == status, response.text
    return str(response.json()["error"])


@pytest.mark.usefixtures("hub")
async def test_pull_shows_progress_and_fills_the_cache(engine: FakeEngine, tmp_path: Path) -> None:
    async with client_for(engine, allow_pull=True) as client:
        lines = await pulled(client, model="hf.co/some/floats:latest")
        assert [lines[0]["status"], lines[-1]["status"]] == ["pulling manifest", "success"]
        sizes = [(line["completed"], line["total"]) for line in lines[1:-1]]
        total = len(FILES["config.json"]) + len(FILES["model.safetensors"])
        assert sizes[0] == (0, total)
        assert all(completed <= total for completed, total in sizes)
        (model,) = cached_models(str(tmp_path / "hub"))
        assert (model.id, model.files) == ("some/floats", ("model.safetensors",))
        again = await pulled(client, name="some/floats")
        assert again[1]["completed"] == total
        whole = await client.post("/api/pull", json={"model": "some/ggufs:q4_k_m", "stream": False})
        assert whole.json() == {"status": "success"}
        ggufs = next(one for one in cached_models(str(tmp_path / "hub")) if one.id == "some/ggufs")
        assert ggufs.files == ("a-Q4_K_M.gguf",)


@pytest.mark.usefixtures("hub")
async def test_pull_of_an_unknown_model_ends_with_an_error(engine: FakeEngine) -> None:
    async with client_for(engine, allow_pull=True) as client:
        lines = await pulled(client, model="no/such")
        assert "no/such" in lines[-1]["error"]
        assert await refused(client, "/api/pull", 404, model="no/such", stream=False)
        lines = await pulled(client, model="some/ggufs")
        assert "name one as some/ggufs:a-Q4_K_M.gguf" in lines[-1]["error"]


async def test_pull_needs_the_operator(engine: FakeEngine) -> None:
    async with client_for(engine, admin_api_key="admin") as client:
        assert "--allow-pull" in await refused(client, "/api/pull", 403, model="some/floats")
        served = await client.post("/api/pull", json={"model": "fake-model:latest"})
        assert served.json() == {"status": "success"}
        for name in ("llama3.2:1b", "../etc/passwd", "a/b/c", "a/b;rm", "-x/y", "http://a/b"):
            assert "cannot be fetched" in await refused(client, "/api/pull", 400, model=name)
        assert "model is required" in await refused(client, "/api/pull", 400)


async def test_one_model_at_a_time_ends_with_its_client(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    with hub_of(MODELS, held) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        async with client_for(engine, allow_pull=True) as client:
            app = client._app  # type: ignore[attr-defined]
            statuses = app.state.pulls.progress("some/floats")
            assert [(await anext(statuses)).status for _ in range(2)] == [
                "pulling manifest",
                "pulling some/floats",
            ]
            assert "another model" in await refused(client, "/api/pull", 409, model="some/ggufs:Q8_0")
            assert "being fetched" in await refused(client, "/api/delete", 409, model="some/floats")
            await statuses.aclose()
            assert not app.state.pulls.is_busy
            held.set()
            assert (await pulled(client, model="some/floats"))[-1] == {"status": "success"}


@pytest.mark.usefixtures("hub")
async def test_delete_removes_a_model_of_the_cache(engine: FakeEngine, tmp_path: Path) -> None:
    async with client_for(engine, allow_pull=True, admin_api_key="admin") as client:
        await pulled(client, model="some/floats")
        assert (await client.get("/api/tags")).json()["models"][0]["name"] == "fake-model"
        response = await client.request("DELETE", "/api/delete", json={"model": "some/floats"})
        assert (response.status_code, response.content) == (200, b"")
        assert cached_models(str(tmp_path / "hub")) == []
        assert "not in the cache" in await refused(client, "/api/delete", 404, model="some/floats")
        assert "is served" in await refused(client, "/api/delete", 409, model="fake-model")
    async with client_for(engine, admin_api_key="admin") as client:
        assert "--allow-pull" in await refused(client, "/api/delete", 403, model="some/floats")
        response = await client.request("DELETE", "/api/delete", json={"model": "a/b"}, headers=ADMIN)
        assert response.status_code == 404
