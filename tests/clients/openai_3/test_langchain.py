# SPDX-License-Identifier: Apache-2.0
"""LangChain's ChatOpenAI, over chat completions and over the Responses API."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.world import (
    ANSWER,
    ARGUMENTS,
    MISSING,
    MODEL,
    NAME,
    PERSON,
    PERSON_QUESTION,
    PICTURE,
    PICTURE_ANSWER,
    PICTURE_QUESTION,
    QUESTION,
    SEEING,
    STRICT_PERSON,
    TOO_LONG,
    TOOL_ANSWER,
    TOOL_QUESTION,
    Person,
    get_weather,
)

WEATHER = tool(get_weather)


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def options(request: pytest.FixtureRequest, base_url: str) -> dict[str, Any]:
    return {
        "base_url": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
        "stream_usage": True,
        "use_responses_api": request.param,
    }


@pytest.fixture
def model(options: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, **options)


def joined(chunks: list[Any]) -> Any:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def test_a_stream_joins_to_the_whole(model: ChatOpenAI) -> None:
    whole = model.invoke(QUESTION)
    streamed = joined(list(model.stream(QUESTION)))
    assert ANSWER in whole.text
    assert streamed.text == whole.text
    assert whole.usage_metadata is not None
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"] > 0


async def test_a_model_runs_asynchronously(model: ChatOpenAI) -> None:
    whole = await model.ainvoke(QUESTION)
    streamed = joined([chunk async for chunk in model.astream(QUESTION)])
    assert ANSWER in whole.text
    assert streamed.text == whole.text


def test_a_batch_answers_each_question(model: ChatOpenAI) -> None:
    answers = model.batch([QUESTION, "What is 12 + 30?"])
    assert ANSWER in answers[0].text
    assert "42" in answers[1].text


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_is_called_and_its_result_is_in_the_answer(model: ChatOpenAI, streamed: bool) -> None:
    bound = model.bind_tools([WEATHER])

    def step(messages: list[Any]) -> AIMessage:
        return joined(list(bound.stream(messages))) if streamed else bound.invoke(messages)

    messages = [HumanMessage(TOOL_QUESTION)]
    first = step(messages)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == (NAME, ARGUMENTS)
    assert TOOL_ANSWER in step([*messages, first, WEATHER.invoke(call)]).text


@pytest.mark.parametrize("streamed", [False, True])
def test_an_overlong_prompt_is_a_context_overflow(model: ChatOpenAI, streamed: bool) -> None:
    with pytest.raises(ContextOverflowError):
        list(model.stream(TOO_LONG)) if streamed else model.invoke(TOO_LONG)


def test_a_missing_model_is_not_found(options: dict[str, Any]) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        ChatOpenAI(model=MISSING, **options).invoke(QUESTION)


# What OpenAI's client has parsed for LangChain is not what LangChain's own types expect in a stream.
@pytest.mark.filterwarnings("ignore:(?s)Pydantic serializer warnings.*field_name='parsed'")
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_an_answer_is_parsed_into_a_model(model: ChatOpenAI, method: Any) -> None:
    structured = model.with_structured_output(Person, method=method)
    assert structured.invoke(PERSON_QUESTION) == PERSON
    *_, last = structured.stream(PERSON_QUESTION)
    assert last == PERSON


async def test_a_schema_is_answered_asynchronously(model: ChatOpenAI) -> None:
    structured = model.with_structured_output(STRICT_PERSON, method="json_schema", strict=True)
    assert await structured.ainvoke(PERSON_QUESTION) == PERSON.model_dump()


@pytest.mark.parametrize("choice", ["any", "Person"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_is_forced(model: ChatOpenAI, choice: str, streamed: bool) -> None:
    bound = model.bind_tools([Person], tool_choice=choice, strict=True, parallel_tool_calls=False)
    done = joined(list(bound.stream(PERSON_QUESTION))) if streamed else bound.invoke(PERSON_QUESTION)
    (call,) = done.tool_calls
    assert (call["name"], call["args"]) == ("Person", PERSON.model_dump())


def test_messages_with_images_are_answered(options: dict[str, Any], seeing_url: str) -> None:
    model = ChatOpenAI(model=SEEING, **options | {"base_url": seeing_url})
    data = base64.b64encode(PICTURE).decode()
    for image in (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image", "base64": data, "mime_type": "image/png"},
    ):
        message = HumanMessage([{"type": "text", "text": PICTURE_QUESTION}, image])
        assert model.invoke([message]).text == PICTURE_ANSWER
