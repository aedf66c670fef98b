# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses: its shape, its events, and what it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.openai.responses.protocol import ResponsesRequest
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.replies import CALL, ODD, REPLIES
from tests.entrypoints.openai.serving import client_for, live_server, named_events
from tests.entrypoints.openai.test_bad_input import check_error
from tests.entrypoints.openai.test_fuzz import SETTINGS
from tests.fixtures.folded import folded

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


async def ask(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def prompt_of(client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return engine.seen[-1][0]["prompt_token_ids"]


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Without what is drawn anew each time."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    return {**response, "id": "", "created_at": 0, "output": items}


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the deltas make."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "response.content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind == "response.output_text.delta":
            part = items[event["output_index"]]["content"][event["content_index"]]
            part["text"] += event["delta"]
            part["logprobs"] += event["logprobs"]
        elif kind == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["item"] == items[-1] | {"status": event["item"]["status"]}
            items[-1] = event["item"]
    return items


@pytest.mark.parametrize("reply", REPLIES)
async def test_stream_joins_to_the_whole(client: httpx.AsyncClient, engine: FakeEngine, reply: str) -> None:
    engine.reply, engine.num_cached_tokens = lambda prompt, index: reply, 3
    with_logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body: dict[str, Any] = {"tools": [TOOL]} if CALL in reply else with_logprobs
    whole = await ask(client, **body)
    response = await client.post(PATH, json={"input": "hi", "stream": True, **body})
    events = named_events(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert joined(events) == events[-1]["response"]["output"]
    assert comparable(events[-1]["response"]) == comparable(whole)
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert events[0]["response"]["output"] == []


async def test_prompt_is_the_same_through_every_api(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I call", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "I call", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = await prompt_of(client, engine, "/v1/chat/completions", {"messages": messages, "tools": tools})
    body = {"input": items, "instructions": "be brief", "tools": [TOOL]}
    assert await prompt_of(client, engine, PATH, body) == chat


async def test_settings_are_honored_and_sent_back(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await ask(
        client, max_output_tokens=3, temperature=0.5, top_p=0.9, seed=7, metadata={"a": "b"}, store=False
    )
    params = engine.seen[-1][1]
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (3, 0.5, 0.9, 7)
    assert (answer["max_output_tokens"], answer["metadata"], answer["store"]) == (3, {"a": "b"}, False)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"


@folded(
    ("body", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": {}}, "conversation"),
        ({"prompt": []}, "prompt"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0.name"),
        ({"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}, "input.0.call_id"),
        ({"input": [{"type": "note", "content": "x"}]}, "input.0.type"),
        ({"input": [{"type": []}]}, "input.0.type"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}, TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools.0.name"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, {"type": "function"}]}]},
            "tools.0.tools.1.name",
        ),
        (
            {
                "tools": [
                    TOOL,
                    {
                        "type": "namespace",
                        "name": "n",
                        "tools": [TOOL, {**TOOL, "name": "h", "strict": True, "parameters": {"type": 5}}],
                    },
                ]
            },
            "tools.1.tools.1.parameters",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [TOOL], "top_logprobs": 1}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"input": [{"role": "user", "content": "boom"}]}, "input"),
        ({"model": "gpt-9"}, "model"),
    ],
)
async def test_refusals_name_the_field(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await client.post(PATH, json={"input": "hi", **body})
    check_error(response, 404 if "model" in body else 400, param)


async def test_a_failure_ends_the_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = 2
    events = named_events((await client.post(PATH, json={"input": "hi", "stream": True})).text)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["sequence_number"] == len(events) - 1
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert not engine.running


@SETTINGS
@given(
    fields=st.dictionaries(
        st.sampled_from([*ResponsesRequest.model_fields]), st.sampled_from(ODD), max_size=3
    )
)
def test_any_values_are_served_or_client_errors(fields: dict[str, Any]) -> None:
    async def send() -> None:
        engine = FakeEngine()
        async with client_for(engine) as client:
            response = await client.post(PATH, json={"input": "hi", **fields})
        assert response.status_code in (200, 400, 404), response.text
        assert not engine.running

    asyncio.run(send())


async def test_openai_client(engine: FakeEngine) -> None:
    async with (
        live_server(engine) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as client,
    ):
        answer = await client.responses.create(model="fake-model", input="hi")
        assert answer.output_text == "Reply 0!"
        async with client.responses.stream(model="fake-model", input="hi") as stream:
            final = await stream.get_final_response()
        assert final.output_text == "Reply 0!"


@pytest.mark.item(11)
async def test_unsupported_include_is_reported(engine: FakeEngine) -> None:
    body = {"input": "hi", "include": ["message.output_text.logprobs", "reasoning.encrypted_content", "x y"]}
    async with client_for(engine) as client:
        answer = await client.post("/v1/responses", json=body)
        told = [*(f"include[{value}]" for value in body["include"][1:])]
        assert answer.json()["ignored"] == told
        assert answer.headers["x-quire-ignored-fields"] == f"{told[0]}, ?"
    async with client_for(engine, unknown_fields="reject") as client:
        refused = await client.post("/v1/responses", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, told[0])
        assert (await client.post("/v1/responses", json={**body, "include": []})).status_code == 200
