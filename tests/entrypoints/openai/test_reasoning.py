# SPDX-License-Identifier: Apache-2.0
"""Reasoning on every API: separated from the answer, whole and streamed, counted, and sent back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from quire.sampling_params import ThinkingMarkers
from tests.entrypoints.openai.fake_engine import TEMPLATE, FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for, events

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
THINKING = (
    TEMPLATE.replace("message.content ~", "(message.reasoning_content or '') ~ message.content ~")
    + "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
THOUGHT, ANSWER = "What is ü? \n A letter.", "It is a letter."
REPLY = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
NUM_THOUGHT_TOKENS = len(f"\n{THOUGHT}\n".encode())  # the fake tokenizer has a token per byte


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(FakeTokenizer(THINKING))
    engine.reply = lambda prompt, index: ANSWER if prompt.endswith("</think>\n\n") else REPLY
    return engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine) as client:
        yield client


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    if path.startswith("/api"):
        return [json.loads(line) for line in response.text.splitlines()]
    if path == CHAT:
        return [event for event in events(response.text) if event != "[DONE]"]
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


async def test_chat_returns_reasoning_by_both_names_and_counts_it(client: httpx.AsyncClient) -> None:
    answer = (await client.post(CHAT, json={"messages": HI})).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == (THOUGHT, THOUGHT)
    assert message["content"] == ANSWER
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT_TOKENS}


async def test_the_deltas_of_chat_join_to_the_message(client: httpx.AsyncClient) -> None:
    chunks = await streamed(client, CHAT, {"messages": HI, "stream_options": {"include_usage": True}})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT_TOKENS}


async def test_include_reasoning_false_leaves_it_out_and_counts_it(client: httpx.AsyncClient) -> None:
    body = {"messages": HI, "include_reasoning": False}
    answer = (await client.post(CHAT, json=body)).json()
    assert "reasoning" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT_TOKENS}
    for chunk in await streamed(client, CHAT, body):
        assert "reasoning" not in chunk["choices"][0]["delta"]


async def test_a_call_may_follow_the_reasoning(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = lambda prompt, index: f"<think>I need f.</think>\n{CALL}"
    choice = (await client.post(CHAT, json={"messages": HI, "tools": [TOOL]})).json()["choices"][0]
    assert choice["message"]["reasoning"] == "I need f."
    assert choice["message"]["content"] is None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": HI, "enable_thinking": False}),
        (CHAT, {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"messages": HI, "reasoning_effort": "none"}),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "none"}}),
        ("/v1/messages", {"messages": HI, "max_tokens": 999, "thinking": {"type": "disabled"}}),
        ("/api/chat", {"model": "fake-model", "messages": HI, "think": False, "stream": False}),
        ("/api/generate", {"model": "fake-model", "prompt": "hi", "think": False, "stream": False}),
    ],
)
async def test_thinking_can_be_switched_off_in_the_words_of_each_api(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    assert "x-quire-ignored-fields" not in response.headers
    assert ANSWER in response.text
    assert "letter. \\n" not in response.text
    prompt = bytes(i for i in engine.seen[-1][0]["prompt_token_ids"] if i < 256).decode()
    assert prompt.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"messages": HI, "reasoning_effort": "high"}, "reasoning_effort"),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("/v1/messages", {"messages": HI, "max_tokens": 9, "thinking": {"type": "enabled"}}, "thinking"),
        ("/api/chat", {"model": "fake-model", "messages": HI, "think": True}, "think"),
    ],
)
async def test_unread_template_option_is_reported_in_each_apis_words(
    path: str, fields: dict[str, Any], name: str
) -> None:
    async with client_for(FakeEngine()) as client:
        response = await client.post(path, json=fields)
        assert (response.status_code, response.headers["x-quire-ignored-fields"]) == (200, name)


async def test_responses_have_an_item_of_reasoning(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/responses", json={"input": "hi"})).json()
    thought, message = answer["output"]
    assert (thought["type"], thought["content"]) == (
        "reasoning",
        [{"type": "reasoning_text", "text": THOUGHT}],
    )
    assert message["content"][0]["text"] == ANSWER
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT_TOKENS}
    found = await streamed(client, "/v1/responses", {"input": "hi"})
    kinds = [event["type"] for event in found]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    deltas = [event["delta"] for event in found if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == THOUGHT
    last = found[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message"]
    assert last["output"][0]["content"] == thought["content"]


async def test_messages_have_a_block_of_thinking(client: httpx.AsyncClient) -> None:
    body = {"messages": HI, "max_tokens": 999}
    blocks = (await client.post("/v1/messages", json=body)).json()["content"]
    assert blocks[0] == {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    assert blocks[1]["text"] == ANSWER
    found = await streamed(client, "/v1/messages", body)
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("text", "") for delta in deltas) == ANSWER


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_ollama_has_a_field_of_thinking(client: httpx.AsyncClient, path: str) -> None:
    body = {"model": "fake-model", **({"messages": HI} if path == "/api/chat" else {"prompt": "hi"})}
    whole = (await client.post(path, json={**body, "stream": False})).json()
    lines = await streamed(client, path, body)
    inner = [line["message"] if path == "/api/chat" else line for line in (whole, *lines)]
    assert inner[0]["thinking"] == "".join(line.get("thinking", "") for line in inner[1:]) == THOUGHT
    text = "content" if path == "/api/chat" else "response"
    assert inner[0][text] == "".join(line.get(text, "") for line in inner[1:]) == ANSWER
    shown = (await client.post("/api/show", json={"model": "fake-model"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": "4", "reasoning": "OLD"}, *HI]}),
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": "4", "reasoning_content": "OLD"}, *HI]}),
        (
            "/v1/responses",
            {
                "input": [
                    *HI,
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "OLD"}]},
                    {"role": "assistant", "content": "4"},
                    *HI,
                ]
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 99,
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "OLD"}, {"type": "text", "text": "4"}],
                    },
                    *HI,
                ],
            },
        ),
        (
            "/api/chat",
            {"model": "fake-model", "messages": [*HI, {"role": "assistant", "content": "4", "thinking": "OLD"}, *HI]},
        ),
    ],
)  # fmt: skip
async def test_earlier_reasoning_reaches_a_template_that_reads_it(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    prompt = bytes(i for i in engine.seen[-1][0]["prompt_token_ids"] if i < 256).decode()
    assert "OLD4" in prompt


@pytest.mark.parametrize("reasoning", [5, {"a": 1}, [1]])
async def test_earlier_reasoning_of_the_wrong_type_is_refused(
    client: httpx.AsyncClient, reasoning: Any
) -> None:
    body = {"messages": [*HI, {"role": "assistant", "content": "4", "reasoning": reasoning}, *HI]}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages.1.reasoning")


async def test_a_budget_of_a_chat_goes_by_the_model_s_own_markers(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """And by whether the prompt has opened or closed the section; without a budget nobody asks."""
    for fields, starts_open in (({}, False), ({"chat_template_kwargs": {"enable_thinking": False}}, False)):
        await client.post(CHAT, json={"messages": HI, "thinking_token_budget": 5, **fields})
        markers = engine.seen[-1][1].thinking_markers
        assert markers == ThinkingMarkers(tuple(b"<think>"), tuple(b"</think>"), starts_open)
    continued = [*HI, {"role": "assistant", "content": "<think>so"}]
    body = {"messages": continued, "continue_final_message": True, "add_generation_prompt": False}
    await client.post(CHAT, json=body | {"thinking_token_budget": 5})
    assert engine.seen[-1][1].thinking_markers.starts_open is True
    await client.post(CHAT, json={"messages": HI})
    assert engine.seen[-1][1].thinking_markers is None
