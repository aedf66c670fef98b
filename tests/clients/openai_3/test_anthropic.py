# SPDX-License-Identifier: Apache-2.0
"""Anthropic's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.world import (
    ANSWER,
    ARGUMENTS,
    DESCRIPTION,
    MISSING,
    MODEL,
    NAME,
    PARAMETERS,
    PERSON,
    PERSON_QUESTION,
    QUESTION,
    STRICT_PERSON,
    TOO_LONG,
    TOOL_ANSWER,
    TOOL_QUESTION,
    Person,
    asked,
    get_weather,
    said_by,
)

GREEDY = {"temperature": 0}  # for which this client has no argument any more
REQUEST: Any = {"model": MODEL, "max_tokens": 64, "messages": asked(QUESTION), "extra_body": GREEDY}
TOOL: Any = {"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}


@pytest.fixture
def client(server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


def joined(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_streamed_joins_to_the_whole(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**REQUEST)
    assert ANSWER in joined(whole)
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**REQUEST) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert joined(final) == text == joined(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens > 0


async def test_a_message_runs_asynchronously(async_client: anthropic.AsyncAnthropic) -> None:
    whole = await async_client.messages.create(**REQUEST)
    async with async_client.messages.stream(**REQUEST) as stream:
        final = await stream.get_final_message()
    assert ANSWER in joined(whole)
    assert joined(final) == joined(whole)


def test_counted_tokens_are_those_of_the_message(client: anthropic.Anthropic) -> None:
    request: Any = {"model": MODEL, "messages": asked(TOOL_QUESTION), "tools": [TOOL]}
    usage = client.messages.create(**request, max_tokens=4).usage
    counted = client.messages.count_tokens(**request).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_is_called_and_its_result_is_in_the_answer(client: anthropic.Anthropic, streamed: bool) -> None:
    def step(messages: list[Any]) -> Any:
        request: Any = REQUEST | {"messages": messages, "tools": [TOOL]}
        if not streamed:
            return client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            return stream.get_final_message()

    messages = asked(TOOL_QUESTION)
    first = step(messages)
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert (call.type, call.name, call.input) == ("tool_use", NAME, ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**ARGUMENTS)}
    second = step([*messages, said_by("assistant", first.content), said_by("user", [result])])
    assert second.stop_reason == "end_turn"
    assert TOOL_ANSWER in second.content[0].text


def test_a_missing_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match=MODEL):
        client.messages.create(**(REQUEST | {"model": MISSING}))
    with (
        pytest.raises(anthropic.NotFoundError, match=MODEL),
        client.messages.stream(**(REQUEST | {"model": MISSING})),
    ):
        pass


def test_overlong_prompt_error_has_anthropics_wording(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**(REQUEST | {"messages": asked(TOO_LONG)}))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "Person"}], ids=["any", "tool"])
def test_a_call_is_forced(client: anthropic.Anthropic, choice: Any, streamed: bool) -> None:
    tool = {"name": "Person", "input_schema": STRICT_PERSON, "strict": True}
    request: Any = REQUEST | {"messages": asked(PERSON_QUESTION), "tools": [tool]}
    request["tool_choice"] = choice | {"disable_parallel_tool_use": True}
    if streamed:
        with client.messages.stream(**request) as stream:
            done = stream.get_final_message()
    else:
        done = client.messages.create(**request)
    (call,) = done.content
    assert done.stop_reason == "tool_use"
    assert (call.type, call.name, call.input) == ("tool_use", "Person", PERSON.model_dump())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_message_is_parsed_into_a_model(client: anthropic.Anthropic, streamed: bool) -> None:
    request: Any = REQUEST | {"messages": asked(PERSON_QUESTION), "output_format": Person}
    if streamed:
        with client.messages.stream(**request) as stream:
            done = stream.get_final_message()
    else:
        done = client.messages.parse(**request)
    assert done.parsed_output == PERSON
