# SPDX-License-Identifier: Apache-2.0
"""Ollama's routes: lines and whole replies, options, what is served, errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from quire.entrypoints.ollama.models import facts_of_files
from quire.entrypoints.ollama.protocol import ChatRequest, GenerateRequest
from quire.entrypoints.text_form import TextForm
from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.replies import ODD, REPLIES
from tests.entrypoints.openai.serving import client_for
from tests.entrypoints.openai.test_fuzz import SETTINGS
from tests.fixtures.folded import folded

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
NO_OBJECT = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake-model", "messages": HI, "tools": [TOOL]},
    GENERATE: {"model": "fake-model", "prompt": "hi"},
}


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json={**BODIES[path], "stream": False, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def joined(path: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = dict(lines[-1])
    if path == GENERATE:
        return whole | {"response": "".join(line["response"] for line in lines)}
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    message = {"role": "assistant", "content": "".join(line["message"]["content"] for line in lines)}
    return whole | {"message": message | ({"tool_calls": calls} if calls else {})}


def comparable(reply: dict[str, Any]) -> dict[str, Any]:
    for call in reply.get("message", {}).get("tool_calls", []):
        call["id"] = ""
    return {**reply, "created_at": ""}


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("path", BODIES)
async def test_lines_join_to_the_whole(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, reply: str
) -> None:
    engine.reply = lambda prompt, index: reply
    whole = await ask(client, path)
    response = await client.post(path, json=BODIES[path])  # a stream is what one gets without asking
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert comparable(joined(path, lines)) == comparable(whole)
    assert whole["eval_count"] == len(reply.encode()) + 1
    assert {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"} <= whole.keys()


async def test_prompt_is_the_same_through_every_api(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/chat/completions", json={"messages": [{"role": "system", "content": "s"}, *HI]})
    expected = engine.seen[-1][0]["prompt_token_ids"]
    await ask(client, GENERATE, system="s")
    assert engine.seen[-1][0]["prompt_token_ids"] == expected
    await ask(client, CHAT, messages=[{"role": "system", "content": "s"}, *HI], tools=[])
    assert engine.seen[-1][0]["prompt_token_ids"] == expected


async def test_options(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    options = {
        "num_predict": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 5, "stop": ["x"], "repeat_penalty": 1.5,
        "num_ctx": 4096, "mirostat": 0,
    }  # fmt: skip
    body = {**BODIES[CHAT], "stream": False, "options": options, "keep_alive": "5m", "think": False}
    response = await client.post(CHAT, json=body)
    params = engine.seen[-1][1]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (3, 0.5, 7, 0.9)
    assert (params.seed, params.stop, params.repetition_penalty) == (5, ("x",), 1.5)
    assert response.json()["done_reason"] == "length"
    assert "keep_alive" in response.headers["x-quire-ignored-fields"]
    reply = response.json()
    assert ", ".join(reply["ignored"]) == response.headers["x-quire-ignored-fields"]
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert reply["usage"]["completion_tokens"] == reply["eval_count"] == 3
    assert (reply["timings"]["queue_s"], reply["timings"]["prefill_s"]) == (0.5, 1.0)
    await ask(client, CHAT, options={"num_predict": -1})
    assert engine.seen[-1][1].max_tokens is None


async def test_empty_messages_load_the_model(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await ask(client, CHAT, messages=[], keep_alive="5m")
    assert (reply["done_reason"], reply["ignored"]) == ("load", ["keep_alive"])
    assert (await ask(client, GENERATE, prompt=""))["done_reason"] == "load"
    assert not engine.seen


async def test_served_model_is_listed_and_shown(client: httpx.AsyncClient) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = (await client.get(path)).json()["models"]
        assert (model["name"], model["details"]["family"]) == ("fake-model", "fake")
    assert (await client.get("/api/version")).json()["version"]
    for name in ("fake-model", "fake-model:latest"):
        shown = (await client.post("/api/show", json={"model": name})).json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"]["fake.context_length"] == 4096
        assert (await ask(client, CHAT, model=name))["model"] == name


@folded(
    ("path", "body", "status", "part"),
    [
        (CHAT, {"model": "nope"}, 404, "nope"),
        (CHAT, {"model": None}, 400, "model is required"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "text only"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "role"),
        (CHAT, {"options": {"mirostat": 3}}, 400, "options.mirostat"),
        (CHAT, {"options": {"num_predict": 2.5}}, 400, "options.num_predict"),
        (CHAT, {"options": {"mirostat": False}}, 400, "options.mirostat"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ""}]}, 400, "images"),
        (
            CHAT,
            {"messages": [{"role": "tool", "content": "x", "tool_name": [], "name": "f"}]},
            400,
            "tool_name",
        ),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        (CHAT, {"messages": [], "tools": [TOOL, TOOL]}, 400, "tools.1.function.name"),
        *(
            (CHAT, {"messages": [], "tools": [{**TOOL, "type": type}]}, 400, "type")
            for type in ({}, [], 0, False)
        ),
        (CHAT, {"messages": [], "options": {"temperature": -1}}, 400, "options.temperature"),
        (GENERATE, {"prompt": "", "top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        (GENERATE, {"prompt": "", "suffix": "x"}, 400, "suffix"),
        (CHAT, {"options": {"temperature": -1}}, 400, "options.temperature"),
        (CHAT, {"options": {"num_predict": 0}}, 400, "options.num_predict"),
        (CHAT, {"format": "yaml"}, 400, "format"),
        (GENERATE, {"suffix": "x", "system": "y"}, 400, "system"),
        (GENERATE, {"context": [1]}, 400, "context"),
        (GENERATE, {"suffix": "x"}, 400, "suffix"),
        ("/api/show", {"model": "nope"}, 404, "nope"),
        ("/api/show", {"model": "fake-model", "name": "nope"}, 404, "nope"),
        ("/api/show", {}, 400, "model"),
    ],
)
async def test_errors_are_sentences(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, part: str
) -> None:
    response = await client.post(path, json={**BODIES.get(path, {}), **body})
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    assert part in response.json()["error"]


async def test_a_failure_ends_the_lines(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = 2
    lines = [json.loads(line) for line in (await client.post(CHAT, json=BODIES[CHAT])).text.splitlines()]
    assert ["error" in line for line in lines] == [False] * (len(lines) - 1) + [True]
    assert not engine.running


@SETTINGS
@given(
    fields=st.dictionaries(
        st.sampled_from([*(ChatRequest.model_fields | GenerateRequest.model_fields)]),
        st.sampled_from([*ODD, {"num_predict": "x"}, {"stop": 5}, {"temperature": [1]}]),
        max_size=3,
    ),
    path=st.sampled_from([*BODIES, "/api/show"]),
)
def test_any_values_are_served_or_client_errors(fields: dict[str, Any], path: str) -> None:
    async def send() -> None:
        engine = FakeEngine()
        async with client_for(engine) as client:
            response = await client.post(path, json={**BODIES.get(path, {}), **fields})
        assert response.status_code in (200, 400, 404), response.text
        assert not engine.running

    asyncio.run(send())


@pytest.mark.parametrize("streams", [False, True])
async def test_raw_prompt_is_continued_without_template_or_parsing(
    client: httpx.AsyncClient, engine: FakeEngine, streams: bool
) -> None:
    engine.reply = lambda prompt, index: '<think>x</think><tool_call>{"name": "f"}</tool_call>'
    body = {**BODIES[GENERATE], "prompt": "<|im_start|>user\nhi", "raw": True, "stream": streams}
    response = await client.post(GENERATE, json=body)
    assert response.status_code == 200, response.text
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert joined(GENERATE, lines)["response"] == engine.reply("", 0)
    ((prompt, _),) = engine.seen
    assert prompt["prompt_token_ids"] == [256, *b"user\nhi"]


async def test_model_without_template_continues_the_prompt() -> None:
    engine = FakeEngine(FakeTokenizer(None))
    async with client_for(engine) as client:
        reply = await ask(client, GENERATE, prompt="hi", system="Be brief.")
    assert reply["response"] == "Reply 0!"
    assert engine.seen[0][0]["prompt_token_ids"] == [*b"Be brief.\n\nhi"]


async def test_suffix_fills_in_the_middle_and_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    fill_in = SimpleNamespace(
        end_ids=[33], encode=lambda text, suffix, add_special_tokens: [1, *text.encode(), 2, *suffix.encode()]
    )
    monkeypatch.setattr(TextForm, "fill_in", fill_in)
    async with client_for(engine) as client:
        await ask(client, GENERATE, prompt="a", suffix="b", options={"stop": ["z"]})
    ((prompt, params),) = engine.seen
    assert prompt["prompt_token_ids"] == [1, *b"a", 2, *b"b"]
    assert list(params.stop_token_ids) == [33]


@folded(
    ("keep_alive", "reason"),
    [(0, "unload"), ("0", "unload"), (0.0, "unload"), ("5m", "load"), (-1, "load"), (None, "load")],
)
@folded("path", BODIES)
async def test_request_without_prompt_reports_load_or_unload(
    client: httpx.AsyncClient, path: str, keep_alive: Any, reason: str
) -> None:
    empty = {"messages": []} if path == CHAT else {"prompt": ""}
    assert (await ask(client, path, **empty, keep_alive=keep_alive))["done_reason"] == reason


@pytest.mark.parametrize("name", ["tool_name", "name"])
async def test_unread_tool_name_is_reported_as_sent(client: httpx.AsyncClient, name: str) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "1", name: "f"}]
    assert (await ask(client, CHAT, messages=turns))["ignored"] == [f"messages[].{name}"]


async def test_system_refused_by_the_template_is_reported_as_sent() -> None:
    refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    engine = FakeEngine(FakeTokenizer(refuses + "<{{ m.role }}>{{ m.content }}{% endfor %}"))
    async with client_for(engine) as client:
        reply = await ask(client, GENERATE, system="Be short.", prompt="hi")
    assert reply["adjusted"] == {"system": "user, for a template without system messages"}


def test_files_of_a_model_have_true_sizes(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(30, 40), "b": torch.zeros(34)}, tmp_path / "model.safetensors")
    facts = facts_of_files(str(tmp_path))
    assert facts.size == (tmp_path / "model.safetensors").stat().st_size
    assert (facts.parameter_size, facts.main_type, facts.form) == ("1.2K", "F32", "safetensors")
    assert facts.modified_at.endswith("Z")
    other = tmp_path / "other"
    other.mkdir()
    save_file({"a": torch.zeros(5, dtype=torch.int32)}, other / "model.safetensors")
    packed = facts_of_files(str(other))
    assert (packed.parameter_size, packed.main_type) == ("", "I32")
    assert packed.digest != facts.digest
    empty = facts_of_files(str(tmp_path / "none"))
    assert (empty.size, empty.modified_at) == (0, "")
