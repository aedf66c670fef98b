# SPDX-License-Identifier: Apache-2.0
"""Adapters come and go while a server runs: by its administrator, and by requests that name them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.adapters import LoRARequest
from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.openai.app import build_app
from quire.errors import ConfigError
from quire.lora.resolver import DirectoryResolver, LoRAResolver
from quire.lora.server.changes import make_resolvers
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.entry_points import Offer
from tests.fixtures.folded import folded

ADMIN = {"authorization": "Bearer admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Shelf(LoRAResolver):
    """A resolver of another package."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> str | None:
        assert base_model_name == "fake-model"
        return f"/shelf/{lora_name}" if lora_name.startswith("book") else None


def served(engine: FakeEngine, **options: Any) -> httpx.AsyncClient:
    client = client_for(engine, admin_api_key="admin", **options)
    client.headers.update(ADMIN)
    return client


async def names(client: httpx.AsyncClient) -> list[str]:
    return [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


async def answer(client: httpx.AsyncClient, model: str) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", "model": model})


def reason(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


async def test_an_adapter_is_loaded_used_and_unloaded() -> None:
    engine = FakeEngine(enable_lora=True)
    async with served(engine) as client:
        assert reason(await answer(client, "pirate"), 404)
        response = await client.post(LOAD, json={"lora_name": "pirate", "lora_path": "/a"})
        assert (response.status_code, response.text) == (
            200,
            "Success: LoRA adapter 'pirate' added successfully.",
        )
        assert await names(client) == ["fake-model", "pirate"]
        assert (await answer(client, "pirate")).status_code == 200
        again = await client.post(LOAD, json={"lora_name": "pirate", "lora_path": "/b"})
        assert "the name 'pirate' is already served" in reason(again, 400)
        await client.post(LOAD, json={"lora_name": "pirate", "lora_path": "/b", "load_inplace": True})
        await answer(client, "pirate")
        assert engine.adapters == [LoRARequest("pirate", 1, "/a"), LoRARequest("pirate", 2, "/b")]
        response = await client.post(UNLOAD, json={"lora_name": "pirate"})
        assert response.text == "Success: LoRA adapter 'pirate' removed successfully."
        assert reason(await answer(client, "pirate"), 404)
        assert "no adapter has the name 'pirate'" in reason(
            await client.post(UNLOAD, json={"lora_name": "pirate"}), 404
        )
        assert engine.loras == [LoRARequest("pirate", 1, "/a")], "it goes when there is no room for it"


@folded(
    ("body", "problem"),
    [
        ({"lora_name": "a/b", "lora_path": "/a"}, "lora_name must be 1 to 256 letters"),
        ({"lora_name": "..", "lora_path": "/a"}, "lora_name must be"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name must be"),
        ({"lora_name": "a" * 257, "lora_path": "/a"}, "lora_name must be"),
        ({"lora_name": "fake-model", "lora_path": "/a"}, "the name 'fake-model' is already served"),
        (
            {"lora_name": "fake-model", "lora_path": "/a", "load_inplace": True},
            "the name 'fake-model' is already served",
        ),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": "a"}, "lora_path is required"),
        ({"lora_name": 7, "lora_path": "/a"}, "lora_name must be a valid string"),
        ({"lora_name": "a", "lora_path": "0" * 4096}, "lora_path cannot be read: File name too long"),
        ({"lora_name": "a", "lora_path": "/bad"}, "adapter 'a': adapter_config.json: no such file"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
async def test_unloadable_adapter_is_refused_without_any_change(body: dict[str, Any], problem: str) -> None:
    async with served(FakeEngine(enable_lora=True)) as client:
        assert problem in reason(await client.post(LOAD, json=body), 400)
        assert await names(client) == ["fake-model"]
        assert (await answer(client, "fake-model")).status_code == 200


async def test_only_an_administrator_changes_adapters() -> None:
    body = {"lora_name": "a", "lora_path": "/a"}
    async with served(FakeEngine()) as client:
        assert "--enable-lora" in reason(await client.post(LOAD, json=body), 400)
        assert "--enable-lora" in reason(await client.post(UNLOAD, json=body), 400)
        del client.headers["authorization"]
        assert reason(await client.post(LOAD, json=body), 401)
    async with client_for(FakeEngine(enable_lora=True)) as client:
        assert (await client.post(LOAD, json=body)).status_code == 404, "there is no such route"


async def test_a_name_is_changed_once_at_a_time() -> None:
    body = {"lora_name": "a", "lora_path": "/a"}
    engine = FakeEngine(enable_lora=True)
    async with served(engine) as client:
        replies = await asyncio.gather(*(client.post(LOAD, json=body) for _ in range(3)))
        first, *others = sorted(reply.status_code for reply in replies)
        assert first == 200
        assert {*others} <= {400, 409}, "it is being loaded, or has been"
        assert len(engine.loras) == 1


async def test_a_directory_is_an_adapter_of_its_name(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    for name in ("pirate", "bad-one", ".hidden"):
        (root / name).mkdir(parents=True)
    (root / "file").touch()
    (tmp_path / "secret").mkdir()
    (root / "way-out").symlink_to(tmp_path / "secret")
    (root / "half-out").mkdir()
    (root / "half-out" / "adapter_model.safetensors").symlink_to(tmp_path / "secret")
    (root / "template-out" / "additional_chat_templates").mkdir(parents=True)
    (root / "template-out" / "additional_chat_templates" / "tool_use.jinja").symlink_to(tmp_path / "secret")
    (root / "alias").symlink_to(root / "pirate")
    engine = FakeEngine(enable_lora=True)
    async with served(engine, lora_dir=str(root)) as client:
        replies = await asyncio.gather(*(answer(client, "pirate") for _ in range(4)))
        assert [reply.status_code for reply in replies] == [200] * 4
        assert engine.loras == [LoRARequest("pirate", 1, str(root / "pirate"))], "read once"
        assert (await answer(client, "alias")).status_code == 200
        for name in (
            "nothing",
            "file",
            "way-out",
            "template-out",
            "half-out",
            ".hidden",
            "..",
            "../secret",
            "pirate/",
            "a\0b",
        ):
            assert "does not exist" in reason(await answer(client, name), 404), name
        assert "adapter_config.json: no such file" in reason(await answer(client, "bad-one"), 400)
        assert await names(client) == ["fake-model", "pirate", "alias"]


async def test_package_may_resolve_adapters(offer: Offer, tmp_path: Path) -> None:
    offer("quire.lora_resolvers", f"shelf={__name__}:Shelf")
    (tmp_path / "book-2").mkdir()
    engine = FakeEngine(enable_lora=True)
    async with served(engine, lora_dir=str(tmp_path)) as client:
        assert (await answer(client, "book-1")).status_code == 200
        assert (await answer(client, "book-2")).status_code == 200, "the directory is asked first"
        assert reason(await answer(client, "tale"), 404)
    assert [one.lora_path for one in engine.loras] == ["/shelf/book-1", str(tmp_path / "book-2")]
    resolvers = make_resolvers(EngineConfig.from_args(enable_lora=True), ServerConfig(lora_dir=str(tmp_path)))
    assert [type(one) for one in resolvers] == [DirectoryResolver, Shelf]


def test_adapter_directory_must_exist_and_needs_adapter_serving(tmp_path: Path) -> None:
    for engine, root, problem in (
        (FakeEngine(), tmp_path, "--lora-dir needs --enable-lora"),
        (FakeEngine(enable_lora=True), tmp_path / "nothing", "is not a directory"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build_app(engine, ServerConfig(lora_dir=str(root)))  # type: ignore[arg-type]
