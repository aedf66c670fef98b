# SPDX-License-Identifier: Apache-2.0
"""Structured output and forced calls by OpenAI's own client, with every major version of it that an environment has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients.world import (
    ARGUMENTS,
    CHAT_TOOL,
    DESCRIPTION,
    MODEL,
    NAME,
    PARAMETERS,
    PERSON,
    PERSON_QUESTION,
    QUESTION,
    STRICT_PERSON,
    TOOL_ANSWER,
    TOOL_QUESTION,
    Person,
    asked,
    get_weather,
    said_by,
)

CHAT: Any = {"model": MODEL, "messages": asked(PERSON_QUESTION), "temperature": 0}
RESPONSE: Any = {"model": MODEL, "input": PERSON_QUESTION, "temperature": 0}
FORMATS: dict[str, Any] = {
    "json_object": {"type": "json_object"},
    "json_schema": {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": STRICT_PERSON, "strict": True},
    },
}
PERSON_TOOL = openai.pydantic_function_tool(Person)
WEATHER_TOOL: Any = CHAT_TOOL | {
    "function": CHAT_TOOL["function"]
    | {"strict": True, "parameters": PARAMETERS | {"additionalProperties": False}}
}
NAMED: Any = {"type": "function", "function": {"name": "Person"}}


class Verdict(BaseModel):
    """Schema that the model would never follow without a constraint."""

    verdict: Literal["guilty", "innocent"]
    case: str = Field(pattern=r"^[A-Z]{2}-[0-9]{3}$")


@pytest.fixture
def client(base_url: str) -> Iterable[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def completion(client: openai.OpenAI, streamed: bool, **request: Any) -> Any:
    """The choice of a completion, parsed by the client."""
    if not streamed:
        return client.chat.completions.parse(**request).choices[0]
    with client.chat.completions.stream(**request) as stream:
        return stream.get_final_completion().choices[0]


def response(client: openai.OpenAI, streamed: bool, **request: Any) -> Any:
    """A response, parsed by the client."""
    if not streamed:
        return client.responses.parse(**request)
    with client.responses.stream(**request) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_is_parsed_into_a_model(client: openai.OpenAI, streamed: bool) -> None:
    choice = completion(client, streamed, **CHAT, response_format=Person)
    assert choice.finish_reason == "stop"
    assert choice.message.parsed == PERSON


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_parsed_into_a_model(client: openai.OpenAI, streamed: bool) -> None:
    assert response(client, streamed, **RESPONSE, text_format=Person).output_parsed == PERSON


async def test_answers_are_parsed_asynchronously(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.parse(**CHAT, response_format=Person)
        response = await client.responses.parse(**RESPONSE, text_format=Person)
    assert chat.choices[0].message.parsed == response.output_parsed == PERSON


@pytest.mark.parametrize("streamed", [False, True])
def test_schema_forces_text_unlikely_for_the_model(client: openai.OpenAI, streamed: bool) -> None:
    other = CHAT | {"messages": asked(QUESTION)}
    message = completion(client, streamed, **other, response_format=Verdict).message
    assert list(json.loads(message.content)) == ["verdict", "case"]
    assert isinstance(message.parsed, Verdict)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_streamed_joins_to_the_whole(client: openai.OpenAI, name: str) -> None:
    request = CHAT | {"response_format": FORMATS[name]}
    whole = client.chat.completions.create(**request).choices[0].message.content
    stream = client.chat.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    assert Person.model_validate_json(whole or "") == PERSON


def test_any_object_is_an_object_for_any_question(client: openai.OpenAI) -> None:
    request: Any = CHAT | {"messages": asked(QUESTION), "response_format": FORMATS["json_object"]}
    choice = client.chat.completions.create(**request, max_tokens=300).choices[0]
    text = choice.message.content or ""
    assert isinstance(json.loads(text), dict) if choice.finish_reason == "stop" else text.startswith("{")


def test_a_schema_that_is_not_kept_to_is_a_bad_request(client: openai.OpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True}
    form: Any = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(**CHAT, response_format=form)
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.responses.create(
            **RESPONSE, text={"format": {"type": "json_schema", "name": "list", "schema": schema}}
        )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_is_parsed_into_a_model(client: openai.OpenAI, choice: Any, streamed: bool) -> None:
    tools = [PERSON_TOOL] if choice == "required" else [WEATHER_TOOL, PERSON_TOOL]
    done = completion(client, streamed, **CHAT, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    (call,) = done.message.tool_calls
    assert (call.function.name, call.function.parsed_arguments) == ("Person", PERSON)
    assert not done.message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_is_made_where_the_model_would_have_answered(client: openai.OpenAI, streamed: bool) -> None:
    request = CHAT | {"messages": asked(QUESTION), "tools": [WEATHER_TOOL]}
    done = completion(client, streamed, **request, tool_choice="required", parallel_tool_calls=False)
    (call,) = done.message.tool_calls
    assert call.function.name == NAME
    assert list(json.loads(call.function.arguments)) == ["city"]
    assert completion(client, streamed, **request, tool_choice="none").message.tool_calls is None


@pytest.mark.parametrize("streamed", [False, True])
def test_strict_tool_is_called_and_its_result_is_in_the_answer(client: openai.OpenAI, streamed: bool) -> None:
    request: Any = {"model": MODEL, "tools": [WEATHER_TOOL, PERSON_TOOL], "temperature": 0}
    messages = asked(TOOL_QUESTION)
    first = completion(client, streamed, **request, messages=messages)
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (NAME, ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**ARGUMENTS)}
    second = completion(client, streamed, **request, messages=[*messages, first.message, result])
    assert TOOL_ANSWER in second.message.content


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "Person"}], ids=["required", "named"]
)
def test_a_response_is_a_forced_call(client: openai.OpenAI, choice: Any, streamed: bool) -> None:
    tool = {"type": "function", "name": "Person", "parameters": STRICT_PERSON, "strict": True}
    done = response(client, streamed, **RESPONSE, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    (call,) = done.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "Person",
        PERSON.model_dump(),
    )


@pytest.mark.parametrize("choice", ["auto", {"name": NAME}], ids=["auto", "named"])
@pytest.mark.parametrize("streamed", [False, True])
def test_legacy_function_is_called_and_its_result_answered(
    client: openai.OpenAI, choice: Any, streamed: bool
) -> None:
    function = {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}

    def step(messages: list[Any], choice: Any) -> Any:
        request: Any = CHAT | {"messages": messages, "functions": [function], "function_call": choice}
        if not streamed:
            return client.chat.completions.create(**request).choices[0]
        with client.chat.completions.stream(**request) as stream:
            return stream.get_final_completion().choices[0]

    messages = asked(TOOL_QUESTION)
    first = step(messages, choice)
    assert first.finish_reason == "function_call"
    call = first.message.function_call
    assert (call.name, json.loads(call.arguments)) == (NAME, ARGUMENTS)
    result = said_by("function", get_weather(**ARGUMENTS)) | {"name": NAME}
    assert TOOL_ANSWER in step([*messages, first.message, result], "auto").message.content
