# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client. This file runs with every major version of it that an environment has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
import pytest

from tests.clients.world import (
    ANSWER,
    ARGUMENTS,
    BEGINNING,
    CHAT_TOOL,
    DESCRIPTION,
    MISSING,
    MODEL,
    NAME,
    PARAMETERS,
    QUESTION,
    TOO_LONG,
    TOOL_ANSWER,
    TOOL_QUESTION,
    asked,
    get_weather,
)

CHAT: Any = {"model": MODEL, "messages": asked(QUESTION), "temperature": 0}
RESPONSE: Any = {"model": MODEL, "input": QUESTION, "temperature": 0}
RESPONSE_TOOL: Any = {
    "type": "function",
    "name": NAME,
    "description": DESCRIPTION,
    "parameters": PARAMETERS,
    "strict": False,
}


@pytest.fixture
def client(base_url: str) -> Iterable[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(base_url: str) -> Any:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_streamed_joins_to_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    assert ANSWER in (whole.choices[0].message.content or "")
    with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens > whole.usage.completion_tokens > 0


async def test_a_chat_runs_asynchronously(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.chat.completions.create(**CHAT)
    stream = await async_client.chat.completions.create(**CHAT, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert ANSWER in text
    assert text == whole.choices[0].message.content


def test_a_completion_streamed_joins_to_the_whole(client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "prompt": BEGINNING, "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**request)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**request, stream=True))
    assert ANSWER in text
    assert text == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0


def test_a_response_streamed_joins_to_the_whole(client: openai.OpenAI) -> None:
    whole = client.responses.create(**RESPONSE)
    assert ANSWER in whole.output_text
    with client.responses.stream(**RESPONSE) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.status == "completed"
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens > 0


async def test_a_response_runs_asynchronously(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.responses.create(**RESPONSE)
    stream = await async_client.responses.create(**RESPONSE, stream=True)
    text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    assert ANSWER in text
    assert text == whole.output_text


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_is_called_and_its_result_is_in_the_answer(client: openai.OpenAI, streamed: bool) -> None:
    def step(messages: list[Any]) -> Any:
        request: Any = {"model": MODEL, "messages": messages, "tools": [CHAT_TOOL], "temperature": 0}
        if not streamed:
            return client.chat.completions.create(**request).choices[0]
        with client.chat.completions.stream(**request) as stream:
            return stream.get_final_completion().choices[0]

    messages = asked(TOOL_QUESTION)
    first = step(messages)
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (NAME, ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**ARGUMENTS)}
    second = step([*messages, first.message, result])
    assert second.finish_reason == "stop"
    assert TOOL_ANSWER in second.message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_response_calls_a_tool_and_answers_with_its_result(client: openai.OpenAI, streamed: bool) -> None:
    def step(items: list[Any]) -> Any:
        request: Any = {"model": MODEL, "input": items, "tools": [RESPONSE_TOOL], "temperature": 0}
        if not streamed:
            return client.responses.create(**request)
        with client.responses.stream(**request) as stream:
            return stream.get_final_response()

    items = asked(TOOL_QUESTION)
    first = step(items)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", NAME, ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": get_weather(**ARGUMENTS)}
    assert TOOL_ANSWER in step([*items, *first.output, result]).output_text


def test_a_missing_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(**(CHAT | {"model": MISSING}))
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.responses.create(**(RESPONSE | {"model": MISSING}))
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.models.retrieve(MISSING)


@pytest.mark.parametrize("streamed", [False, True])
def test_overlong_prompt_error_has_its_code(client: openai.OpenAI, streamed: bool) -> None:
    with pytest.raises(openai.BadRequestError) as in_chat:
        client.chat.completions.create(model=MODEL, messages=asked(TOO_LONG), stream=streamed)
    with pytest.raises(openai.BadRequestError) as in_response:
        client.responses.create(model=MODEL, input=TOO_LONG, stream=streamed)
    assert in_chat.value.code == in_response.value.code == "context_length_exceeded"
