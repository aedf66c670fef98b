# SPDX-License-Identifier: Apache-2.0
"""The stock `openai` client against the served included model."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.end_to_end.server import Server

MODEL = "quire-demo"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(demo_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=180
    ) as client:
        yield client


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_chat_answers_its_facts(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ask("What is the capital of France?"), temperature=0
    )
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_streamed_chat_equals_unstreamed(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": ask("What is 12 + 30?"), "temperature": 0}
    whole = client.chat.completions.create(**request).choices[0]
    chunks = list(
        client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert text == whole.message.content
    assert [reason for reason in reasons if reason] == [whole.finish_reason]
    assert chunks[-1].usage is not None
    assert "42" in text


def test_n_and_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=ask("Tell me a joke."),
        n=2,
        temperature=1.0,
        seed=3,
        logprobs=True,
        top_logprobs=3,
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 3
            tops = [top.logprob for top in entry.top_logprobs]
            assert tops == sorted(tops, reverse=True)


def test_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["The capital of", "12 +"], max_tokens=5, temperature=0, logprobs=2, echo=True
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].text.startswith("The capital of")


def test_tool_call(client: openai.OpenAI) -> None:
    messages = ask("What is the weather like in Paris?")
    reply = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[WEATHER],
        temperature=0,  # type: ignore[list-item]
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"temperature": 3.0}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"model": "nope"}, openai.NotFoundError, "model"),
        ({"extra_body": {"guided_regex": "(a"}}, openai.BadRequestError, "guided_regex"),
    ],
)
def test_errors_name_the_field(
    client: openai.OpenAI, change: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": ask("Hello")}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**(request | change))
    assert caught.value.param == param
    assert client.chat.completions.create(**request).choices[0].message.content


def test_unknown_field_is_named_in_the_reply(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ask("Hello"), max_tokens=4, extra_body={"temprature": 1}
    )
    assert (reply.model_extra or {})["ignored"] == ["temprature"]


@pytest.mark.item(32)
async def test_200_streams_with_disconnects(demo_server: Server) -> None:
    rng = random.Random(1)

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model=MODEL,
            prompt=[rng.randrange(1000) for _ in range(rng.randrange(1, 120))],
            max_tokens=rng.randrange(1, 48),
            temperature=1.0,
            seed=number,
            stream=True,
        )
        reasons = []
        async for chunk in stream:
            if number % 5 == 0:
                await stream.close()
                return "gone"
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        assert len(reasons) == 1
        return str(reasons[0])

    async with openai.AsyncOpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=180
    ) as client:
        results = await asyncio.gather(*(one(client, number) for number in range(200)))
    assert results.count("gone") == 40
    assert set(results) <= {"gone", "stop", "length"}
    async with asyncio.timeout(300):
        while metric(demo_server, "quire:num_requests_running{"):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    assert metric(demo_server, "quire:kv_cache_usage_perc{") == 0
    assert metric(demo_server, "quire:num_requests_waiting{") == 0
