# SPDX-License-Identifier: Apache-2.0
"""Answers that a limit or a stop string cuts, on every API, whole and streamed: no markup, no invented items."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for
from tests.entrypoints.openai.test_reasoning import THINKING, streamed

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
APIS = (CHAT, RESPONSES, MESSAGES, OLLAMA)
THOUGHT, TEXT = "I need the weather.", "I look."
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'
REPLY = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{CALL}\n{CALL}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(FakeTokenizer(THINKING))
    engine.reply = lambda prompt, index: REPLY
    return engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine) as client:
        yield client


def body_of(path: str, max_tokens: int) -> dict[str, Any]:
    """A request of that API with a tool."""
    turn = [{"role": "user", "content": "hi"}]
    function = {"name": "f", "parameters": SCHEMA}
    if path == RESPONSES:
        return {"input": "hi", "tools": [{"type": "function", **function}], "max_output_tokens": max_tokens}
    if path == MESSAGES:
        tool = {"name": "f", "input_schema": SCHEMA}
        return {"model": "fake-model", "messages": turn, "tools": [tool], "max_tokens": max_tokens}
    tools = [{"type": "function", "function": function}]
    if path == OLLAMA:
        return {
            "model": "fake-model",
            "messages": turn,
            "tools": tools,
            "stream": False,
            "options": {"num_predict": max_tokens},
        }
    return {"messages": turn, "tools": tools, "max_tokens": max_tokens}


def read(path: str, answer: dict[str, Any]) -> tuple[str, str, int]:
    """Reasoning, text and the number of calls of a whole answer."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return message.get("reasoning", ""), message["content"] or "", len(message.get("tool_calls", []))
    if path == OLLAMA:
        message = answer["message"]
        return message.get("thinking", ""), message["content"], len(message.get("tool_calls", []))
    if path == RESPONSES:
        items = answer["output"]
        texts = {
            kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
            for kind in ("reasoning", "message")
        }
        return texts["reasoning"], texts["message"], sum(item["type"] == "function_call" for item in items)
    blocks = answer["content"]
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return thought, text, sum(block["type"] == "tool_use" for block in blocks)


def joined(path: str, pieces: list[Any]) -> tuple[str, str, int]:
    """The same of a stream."""
    if path == RESPONSES:
        return read(path, pieces[-1]["response"])
    if path == MESSAGES:
        starts = [piece["content_block"] for piece in pieces if piece["type"] == "content_block_start"]
        deltas = [piece["delta"] for piece in pieces if piece["type"] == "content_block_delta"]
        thought = "".join(delta.get("thinking", "") for delta in deltas)
        text = "".join(delta.get("text", "") for delta in deltas)
        return thought, text, sum(block["type"] == "tool_use" for block in starts)
    if path == OLLAMA:
        messages = [piece["message"] for piece in pieces]
        thought = "".join(message.get("thinking", "") for message in messages)
        text = "".join(message["content"] for message in messages)
        return thought, text, sum(len(message.get("tool_calls", [])) for message in messages)
    deltas = [choice["delta"] for piece in pieces for choice in piece["choices"]]
    thought = "".join(delta.get("reasoning", "") for delta in deltas)
    text = "".join(delta.get("content") or "" for delta in deltas)
    return thought, text, sum(len(delta.get("tool_calls", [])) for delta in deltas)


@pytest.mark.parametrize("path", APIS)
async def test_answer_cut_anywhere_has_no_markup(client: httpx.AsyncClient, path: str) -> None:
    for max_tokens in range(1, len(REPLY)):
        body = body_of(path, max_tokens)
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        thought, text, num_calls = read(path, response.json())
        assert THOUGHT.startswith(thought.rstrip())
        assert TEXT.startswith(text.rstrip())
        assert num_calls == REPLY[:max_tokens].count("}}")
        if max_tokens % 7 == 0:
            assert joined(path, await streamed(client, path, body)) == (thought, text, num_calls)


@pytest.mark.parametrize("path", APIS)
async def test_call_cut_by_stop_string_is_no_content(client: httpx.AsyncClient, path: str) -> None:
    body = body_of(path, 200)
    if path == RESPONSES:
        body["stop"] = ["Par"]
    elif path == OLLAMA:
        body["options"]["stop"] = ["Par"]
    else:
        body["stop_sequences" if path == MESSAGES else "stop"] = ["Par"]
    answer = (await client.post(path, json=body)).json()
    assert read(path, answer) == (THOUGHT, TEXT, 0)


async def test_call_that_is_malformed_and_whole_stays(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = lambda prompt, index: '<tool_call>\n{"name": "f", "arguments'
    for path in APIS:
        answer = (await client.post(path, json=body_of(path, 200))).json()
        assert read(path, answer)[1] == '<tool_call>\n{"name": "f", "arguments'


def states(response: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["type"], item["status"]) for item in response["output"]]


async def test_cut_response_names_the_item_that_was_cut(client: httpx.AsyncClient) -> None:
    thinking, text, call = (
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
    )
    for max_tokens in range(1, len(REPLY)):
        said = REPLY[:max_tokens]
        body = body_of(RESPONSES, max_tokens)
        pieces = await streamed(client, RESPONSES, body)
        response = pieces[-1]["response"]
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        num_calls = said.count("}}")
        expected = [thinking, text, *[call] * num_calls]
        if "<" not in said[len("<think>") :].partition("\n\n")[2]:
            is_open = said.partition("\n\n")[2].strip() != ""
            expected = [thinking, ("message", "incomplete")] if is_open else [thinking]
        if "</think>" not in said:
            expected = [("reasoning", "incomplete")] if said.removeprefix("<think>").strip() else []
        if max_tokens < len("<think>"):
            expected = []
        assert states(response) == expected, said
        added = [piece["item"]["type"] for piece in pieces if piece["type"] == "response.output_item.added"]
        assert added == [kind for kind, _ in expected]
        done = [piece["item"] for piece in pieces if piece["type"] == "response.output_item.done"]
        assert [(item["type"], item["status"]) for item in done] == expected


async def test_response_with_logprobs_invents_no_message(client: httpx.AsyncClient) -> None:
    end_of_thought = len(f"<think>\n{THOUGHT}\n</think>\n\n")
    for max_tokens in range(1, end_of_thought + 3):
        body = {"input": "hi", "max_output_tokens": max_tokens, "top_logprobs": 1}
        pieces = await streamed(client, RESPONSES, body)
        response = pieces[-1]["response"]
        kinds = [item["type"] for item in response["output"]]
        assert (
            kinds
            == ["reasoning", "message"][: (max_tokens > len("<think>\n")) + (max_tokens > end_of_thought)]
        )
        assert [piece["item"]["type"] for piece in pieces if piece["type"].endswith("item.added")] == kinds


async def test_response_stopped_in_its_reasoning_has_no_message(client: httpx.AsyncClient) -> None:
    answer = (await client.post(RESPONSES, json={"input": "hi", "stop": ["weather"]})).json()
    assert states(answer) == [("reasoning", "completed")]


async def test_whole_response_without_text_has_empty_message(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply = lambda prompt, index: f"<think>\n{THOUGHT}\n</think>"
    answer = (await client.post(RESPONSES, json=body_of(RESPONSES, 200))).json()
    assert states(answer) == [("reasoning", "completed"), ("message", "completed")]
