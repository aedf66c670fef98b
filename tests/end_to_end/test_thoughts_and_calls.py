# SPDX-License-Identifier: Apache-2.0
"""The included model thinks, and calls two tools at once: through the stock client, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.end_to_end.server import Server

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": CITY}}
    for name, text in (("get_weather", "Get the current weather"), ("get_time", "Get the current time"))
]
RESULTS = {"get_weather": '{"temperature": 21, "condition": "sunny"}', "get_time": '{"time": "14:05"}'}
CALLS = [
    (
        "What is the weather in Paris and Rome?",
        [("get_weather", "Paris"), ("get_weather", "Rome")],
        "It is 21 degrees and sunny in Paris. It is 21 degrees and sunny in Rome.",
    ),
    (
        "What are the time and the weather in Oslo?",
        [("get_time", "Oslo"), ("get_weather", "Oslo")],
        "It is 14:05 in Oslo. It is 21 degrees and sunny in Oslo.",
    ),
    ("What time is it in Lima?", [("get_time", "Lima")], "It is 14:05 in Lima."),
]


@pytest.fixture
def client(demo_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=180
    ) as client:
        yield client


def whole(client: openai.OpenAI, **fields: Any) -> dict[str, Any]:
    """The message of an answer, as a client sends it back."""
    reply = client.chat.completions.create(model="quire-demo", temperature=0, **fields)
    return reply.choices[0].message.model_dump(exclude_none=True)


def streamed(client: openai.OpenAI, **fields: Any) -> dict[str, Any]:
    """The same message out of a stream."""
    message: dict[str, Any] = {"role": "assistant"}
    calls: dict[int, dict[str, Any]] = {}
    stream = client.chat.completions.create(model="quire-demo", temperature=0, stream=True, **fields)
    for chunk in stream:
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        for part in delta.pop("tool_calls", []):
            call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
            for name in ("name", "arguments"):
                call["function"][name] += part["function"].get(name) or ""
            call.update({name: part[name] for name in ("id", "type") if name in part})
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
    return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {})


def called(message: dict[str, Any]) -> list[tuple[str, str]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])["city"]) for function in functions]


@pytest.mark.parametrize("answer", [whole, streamed])
@pytest.mark.parametrize("effort", ["none", "low"])
@pytest.mark.parametrize(("question", "calls", "said"), CALLS)
def test_calls_are_made_and_results_are_answered(
    client: openai.OpenAI, answer: Any, effort: str, question: str, calls: list[tuple[str, str]], said: str
) -> None:
    conversation: list[Any] = [{"role": "user", "content": question}]
    fields: dict[str, Any] = {"tools": TOOLS, "reasoning_effort": effort}
    turn = answer(client, messages=conversation, **fields)
    assert called(turn) == calls
    assert not turn.get("content")
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": RESULTS[call["function"]["name"]]}
        for call in turn["tool_calls"]
    ]
    final = answer(client, messages=[*conversation, turn, *results], **fields)
    assert final["content"] == said
    assert [bool(message.get("reasoning")) for message in (turn, final)] == [effort == "low"] * 2


def test_parallel_calls_can_be_disabled(client: openai.OpenAI) -> None:
    question, calls, _ = CALLS[0]
    messages = [{"role": "user", "content": question}]
    assert called(whole(client, messages=messages, tools=TOOLS, parallel_tool_calls=False)) == calls[:1]


@pytest.mark.parametrize("answer", [whole, streamed])
def test_thought_precedes_the_answer_if_requested(client: openai.OpenAI, answer: Any) -> None:
    messages = [{"role": "user", "content": "What is 47 - 38?"}]
    plain = answer(client, messages=messages)
    thought = answer(client, messages=messages, reasoning_effort="low")
    assert plain["content"] == thought["content"] == "47 - 38 = 9."
    assert "reasoning" not in plain
    assert thought["reasoning"] == thought["reasoning_content"]
    assert thought["reasoning"].startswith("The tens make ")


def test_an_answer_in_json_is_enforced_behind_the_thought(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    messages = [{"role": "user", "content": "Extract the name as JSON: Peter is 36 and lives in Paris."}]
    message = whole(client, messages=messages, response_format=form, reasoning_effort="low")
    assert json.loads(message["content"]) == {"name": "Peter"}
    assert message["reasoning"]
