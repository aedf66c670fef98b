# SPDX-License-Identifier: Apache-2.0
"""Instructor, by each of its modes that a server of OpenAI's API can serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
import openai
import pytest
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel

from tests.clients.world import (
    ARGUMENTS,
    CHAT_TOOL,
    MISSING,
    MODEL,
    NAME,
    PERSON,
    PERSON_QUESTION,
    TOOL_ANSWER,
    TOOL_QUESTION,
    Person,
    asked,
    said_by,
)
from tests.clients.world import get_weather as weather_of

MODES = ("JSON", "JSON_SCHEMA", "TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS")
REQUEST: Any = {"model": MODEL, "messages": asked(PERSON_QUESTION), "temperature": 0, "max_retries": 0}


class get_weather(BaseModel):
    """Get the current weather of a city."""

    city: str


def wrapped(base_url: str, mode: str) -> instructor.Instructor:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_parsed_into_a_model(base_url: str, mode: str) -> None:
    # Instructor makes a class of its own out of the model, so values are compared.
    assert (wrapped(base_url, mode).create(Person, **REQUEST)).model_dump() == PERSON.model_dump()


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_ends_with_the_whole(base_url: str, mode: str) -> None:
    parts = list(wrapped(base_url, mode).create_partial(Person, **REQUEST))
    assert parts[-1].model_dump() == PERSON.model_dump()


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_is_parsed_asynchronously(base_url: str, mode: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        asynchronous = instructor.from_openai(client, mode=instructor.Mode[mode])
        assert (await asynchronous.create(Person, **REQUEST)).model_dump() == PERSON.model_dump()


def test_the_reply_is_at_hand_beside_the_model(base_url: str) -> None:
    person, reply = wrapped(base_url, "TOOLS").create_with_completion(response_model=Person, **REQUEST)
    assert person.model_dump() == PERSON.model_dump()
    assert reply.choices[0].finish_reason in ("stop", "tool_calls")
    assert reply.usage.total_tokens > reply.usage.completion_tokens > 0


def test_one_of_several_tools_is_called(base_url: str) -> None:
    client = wrapped(base_url, "PARALLEL_TOOLS")
    request = REQUEST | {"messages": asked(TOOL_QUESTION)}
    (call,) = client.create(Iterable[get_weather], **request)
    assert call == get_weather(**ARGUMENTS)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_is_called_and_its_result_is_in_the_answer(base_url: str, streamed: bool) -> None:
    client, messages = wrapped(base_url, "TOOLS"), asked(TOOL_QUESTION)
    request = REQUEST | {"messages": messages}
    if streamed:
        *_, found = client.create_partial(get_weather, **request)
    else:
        found = client.create(get_weather, **request)
    assert found.model_dump() == ARGUMENTS
    function = {"name": NAME, "arguments": found.model_dump_json()}
    call = said_by("assistant", "") | {"tool_calls": [{"id": "a", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "a", "content": weather_of(**ARGUMENTS)}
    request |= {"messages": [*messages, call, result], "tools": [CHAT_TOOL]}
    reply = client.create(None, **request, stream=streamed)
    if streamed:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
    else:
        text = reply.choices[0].message.content
    assert TOOL_ANSWER in text


def test_errors_are_the_clients_own(base_url: str) -> None:
    with pytest.raises(InstructorRetryException, match=MODEL):
        wrapped(base_url, "TOOLS").create(Person, **REQUEST | {"model": MISSING})
