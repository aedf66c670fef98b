# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages and its token count: Anthropic's shape, events, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.anthropic.protocol import MessagesRequest
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.replies import ODD, REPLIES
from tests.entrypoints.openai.serving import client_for, named_events
from tests.entrypoints.openai.test_fuzz import SETTINGS
from tests.entrypoints.openai.test_tenants_and_limits import fair_engine
from tests.fixtures.folded import folded

PATH = "/v1/messages"
BASE: dict[str, Any] = {"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}


async def ask(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={**BASE, **body}, headers=HEADERS)
    assert response.status_code == 200, response.text
    return dict(response.json())


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events make."""
    message = dict(events[0]["message"])
    for event in events[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"pieces": ""})
        elif kind == "content_block_delta":
            delta = event["delta"]
            message["content"][event["index"]]["pieces"] += delta.get("text", delta.get("partial_json"))
        elif kind == "content_block_stop":
            block = message["content"][event["index"]]
            pieces = block.pop("pieces")
            block |= {"text": pieces} if block["type"] == "text" else {"input": json.loads(pieces)}
        elif kind == "message_delta":
            told = {name: value for name, value in event.items() if name not in ("type", "delta")}
            message |= {**event["delta"], **told}
    return message


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


@pytest.mark.parametrize("reply", REPLIES)
async def test_stream_joins_to_the_whole(client: httpx.AsyncClient, engine: FakeEngine, reply: str) -> None:
    engine.reply, engine.num_cached_tokens = lambda prompt, index: reply, 3
    whole = await ask(client, tools=[TOOL])
    events = named_events((await client.post(PATH, json={**BASE, "tools": [TOOL], "stream": True})).text)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert comparable(joined(events)) == comparable(whole)
    assert whole["timings"].keys() == {"queue_s", "prefill_s", "decode_s", "tokens_per_s"}
    assert whole["usage"]["cache_read_input_tokens"] == 3
    prompt = len(engine.seen[-1][0]["prompt_token_ids"])
    assert whole["usage"]["input_tokens"] == events[0]["message"]["usage"]["input_tokens"] == prompt - 3


@pytest.mark.parametrize(
    ("body", "reply", "reason", "sequence"),
    [
        ({}, "done", "end_turn", None),
        ({"max_tokens": 2}, "done", "max_tokens", None),
        ({"stop_sequences": ["n"]}, "done", "stop_sequence", "n"),
        ({"tools": [TOOL]}, REPLIES[2], "tool_use", None),
    ],
)
async def test_stop_reasons(
    client: httpx.AsyncClient, engine: FakeEngine, body: Any, reply: str, reason: str, sequence: str | None
) -> None:
    engine.reply = lambda prompt, index: reply
    message = await ask(client, **body)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_prompt_is_the_same_through_every_api(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I call", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "user", "content": "and?"},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I call"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "42"}]},
            {"type": "text", "text": "and?"}]},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    await client.post("/v1/chat/completions", json={"messages": chat, "tools": tools})
    expected = engine.seen[-1][0]["prompt_token_ids"]
    prompt = {"messages": messages, "system": [{"type": "text", "text": "be brief"}], "tools": [TOOL]}
    await ask(client, **prompt)
    assert engine.seen[-1][0]["prompt_token_ids"] == expected
    counted = await client.post(f"{PATH}/count_tokens", json=prompt)
    assert counted.json() == {"input_tokens": len(expected)}


async def test_model_continues_a_given_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    begun = [*BASE["messages"], {"role": "assistant", "content": "It is"}]
    await ask(client, messages=begun)
    ids = engine.seen[-1][0]["prompt_token_ids"]
    assert bytes(ids[-5:]) == b"It is"


async def test_fields_without_effect_are_named(client: httpx.AsyncClient) -> None:
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [block]}]
    body = {**BASE, "messages": messages, "thinking": {"type": "enabled", "budget_tokens": 2048}}
    response = await client.post(PATH, json=body)
    assert response.status_code == 200
    named = response.headers["x-quire-ignored-fields"].split(", ")
    assert named == ["messages[].content[].cache_control", "thinking.budget_tokens", "thinking"]


@folded(
    ("body", "status", "kind"),
    [
        ({"model": "claude"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            400,
            "invalid_request_error",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 0}]}
                ]
            },
            400,
            "invalid_request_error",
        ),
        ({"tools": [{**TOOL, "description": 5}]}, 400, "invalid_request_error"),
        ({"metadata": {"user_id": 5}}, 400, "invalid_request_error"),
        ({"metadata": {"user_id": "x" * 257}}, 400, "invalid_request_error"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, 400, "invalid_request_error"),
        ({"tools": [{"type": "custom", "name": "w"}]}, 400, "invalid_request_error"),
        (
            {"tools": [{"type": "bash_20250124", "name": "b"}], "tool_choice": {"type": "any"}},
            400,
            "invalid_request_error",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error"),
    ],
)
async def test_errors_have_anthropics_shape(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, kind: str
) -> None:
    for streamed in (False, True):
        response = await client.post(PATH, json={**BASE, **body, "stream": streamed})
        assert response.status_code == status, response.text
        answer = response.json()
        assert (answer["type"], answer["error"]["type"]) == ("error", kind)
        assert answer["request_id"] == response.headers["x-request-id"]


async def test_refusals_have_anthropics_form(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("k",)) as client:
        refused = (await client.post(PATH, json=BASE)).json()
        assert refused["error"]["type"] == "authentication_error"
        wrong = await client.get(PATH, headers={"authorization": "Bearer k"})
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
        engine.is_ready = False
        loading = await client.post(PATH, json=BASE, headers={"authorization": "Bearer k"})
        assert loading.json()["error"]["type"] == "overloaded_error"


async def test_a_failure_ends_the_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = 2
    events = named_events((await client.post(PATH, json={**BASE, "stream": True})).text)
    assert [event["type"] for event in events].count("error") == 1
    assert events[-1]["error"]["type"] == "api_error"
    assert not engine.running


@SETTINGS
@given(
    fields=st.dictionaries(
        st.sampled_from([*MessagesRequest.model_fields]), st.sampled_from(ODD), max_size=3
    ),
    path=st.sampled_from([PATH, f"{PATH}/count_tokens"]),
)
def test_any_values_are_served_or_client_errors(fields: dict[str, Any], path: str) -> None:
    async def send() -> None:
        engine = FakeEngine()
        async with client_for(engine) as client:
            response = await client.post(path, json={**BASE, **fields})
        assert response.status_code in (200, 400, 404), response.text
        assert not engine.running

    asyncio.run(send())


@pytest.mark.parametrize("user", [{}, {"user_id": "me"}], ids=str)
async def test_ignored_metadata_is_reported_by_its_own_name(
    client: httpx.AsyncClient, user: dict[str, Any]
) -> None:
    assert (await ask(client, metadata=user))["ignored"] == ["metadata"]


@pytest.mark.parametrize(
    ("path", "headers"),
    [(PATH, {}), (f"{PATH}/count_tokens", {}), ("/v1/models", HEADERS), ("/v1/models/none", HEADERS)],
)
async def test_anthropics_client_gets_the_request_id(
    client: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> None:
    method = "POST" if path.startswith(PATH) else "GET"
    for body in (BASE, {}):  # an answer, and an error where a body is read
        reply = await client.request(method, path, json=body if method == "POST" else None, headers=headers)
        assert reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_other_clients_get_no_second_request_id(client: httpx.AsyncClient) -> None:
    assert "request-id" not in (await client.get("/v1/models")).headers


async def test_metadata_that_names_a_tenant_is_not_ignored() -> None:
    async with client_for(fair_engine()) as client:
        assert "ignored" not in await ask(client, metadata={"user_id": "me"})
        assert (await ask(client, metadata={"user_id": "me", "team": "x"}))["ignored"] == ["metadata"]
