# SPDX-License-Identifier: Apache-2.0
"""Adapters are models of their own to clients: listed, chosen by `model`, and named so in replies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import ServerConfig
from quire.entrypoints.openai.app import build_app
from quire.errors import ConfigError, StartupError
from quire.lora.peft_config import adapter_request
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    return tmp_path


async def test_model_chooses_an_adapter(directory: Path) -> None:
    engine, modules = FakeEngine(enable_lora=True), (f"pirate={directory}", f"json-2={directory}")
    asked: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
        ("/api/chat", {"messages": HI, "stream": False}),
    ]
    async with client_for(engine, lora_modules=modules) as client:
        for path, body in asked:
            for name in ("json-2", "fake-model", "pirate"):
                reply = await client.post(path, json=body | {"model": name})
                assert (reply.status_code, reply.json()["model"]) == (200, name), reply.text
            assert engine.adapters == [
                adapter_request("json-2", 2, str(directory)),
                None,
                adapter_request("pirate", 1, str(directory)),
            ]
            engine.adapters.clear()
        unknown = await client.post("/v1/completions", json={"prompt": "hi", "model": "../pirate"})
        assert unknown.status_code == 404
        assert "this server serves: fake-model, pirate, json-2" in unknown.text


async def test_adapters_are_listed_with_their_parent(directory: Path) -> None:
    async with client_for(FakeEngine(enable_lora=True), lora_modules=(f"pirate={directory}",)) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("fake-model", None),
            ("pirate", "fake-model"),
        ]
        assert (await client.get("/v1/models/pirate")).json() == cards[1]


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("pirate", "must be NAME=DIRECTORY"),
        ("=path", "must be NAME=DIRECTORY"),
        ("a/b={}", "must be NAME=DIRECTORY"),
        ("..={}", "must be NAME=DIRECTORY"),
        ("fake-model={}", "the name 'fake-model' is used twice"),
    ],
)
def test_invalid_adapter_is_refused_at_start(module: str, problem: str, directory: Path) -> None:
    config = ServerConfig(lora_modules=(module.format(directory),))
    with pytest.raises(StartupError, match=problem):
        build_app(FakeEngine(enable_lora=True), config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--lora-modules needs --enable-lora"):
        build_app(FakeEngine(), config)  # type: ignore[arg-type]


async def test_a_chat_has_the_template_of_its_adapter(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("Arr, {{ messages[0].content }}!")
    engine = FakeEngine(enable_lora=True)
    async with client_for(engine, lora_modules=(f"pirate={directory}",)) as client:
        for model, prompt in {"pirate": "Arr, hi!", "fake-model": "<|im_start|>user"}.items():
            ids = []
            for path in ("/v1/chat/completions", "/tokenize"):
                reply = await client.post(
                    path, json={"messages": HI, "model": model, "return_token_ids": True}
                )
                body = reply.json()
                ids.append(body.get("prompt_token_ids") or body["tokens"])
            assert ids[0] == ids[1]
            assert engine.tokenizer is not None
            assert engine.tokenizer.decode(ids[0], skip_special_tokens=False).startswith(prompt)
        body = {"messages": HI, "model": "pirate", "max_tokens": 9}
        count = (await client.post("/v1/messages/count_tokens", json=body)).json()
        assert count["input_tokens"] == len("Arr, hi!")
        shown = (await client.post("/api/show", json={"model": "pirate"})).json()
        assert shown["template"].startswith("Arr")


async def test_a_template_that_does_not_work_is_refused_at_load(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% if %}")
    async with client_for(FakeEngine(enable_lora=True), admin_api_key="admin") as client:
        client.headers["authorization"] = "Bearer admin"
        body = {"lora_name": "pirate", "lora_path": str(directory)}
        reply = await client.post("/v1/load_lora_adapter", json=body)
        assert reply.status_code == 400
        assert "adapter 'pirate': the checkpoint's chat template is not valid Jinja" in reply.text
        assert len((await client.get("/v1/models")).json()["data"]) == 1
