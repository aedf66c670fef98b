# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex, over chat completions, completions and the Responses API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike

from tests.clients.world import (
    ANSWER,
    ARGUMENTS,
    BEGINNING,
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
    TOO_LONG,
    TOOL_ANSWER,
    TOOL_QUESTION,
    Person,
    get_weather,
)

CONTEXT = 2048
WEATHER = FunctionTool.from_defaults(get_weather)
Make = Callable[..., FunctionCallingLLM]


def chat(**options: Any) -> FunctionCallingLLM:
    return OpenAILike(is_chat_model=True, is_function_calling_model=True, **options)


def responses(**options: Any) -> FunctionCallingLLM:
    return OpenAIResponses(max_output_tokens=64, **options)


@pytest.fixture
def options(base_url: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "api_base": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
        "context_window": CONTEXT,
    }


@pytest.fixture(params=[chat, responses])
def make(request: pytest.FixtureRequest, options: dict[str, Any]) -> Make:
    return lambda **changes: request.param(**options | changes)


def test_a_chat_streamed_joins_to_the_whole(make: Make) -> None:
    messages = [ChatMessage(QUESTION)]
    whole = make().chat(messages)
    parts = list(make().stream_chat(messages))
    assert ANSWER in (whole.message.content or "")
    assert "".join(part.delta or "" for part in parts) == whole.message.content
    assert parts[-1].message.content == whole.message.content
    assert whole.raw.usage.total_tokens > 0


def test_a_completion_streamed_joins_to_the_whole(make: Make) -> None:
    whole = make().complete(QUESTION)
    parts = list(make().stream_complete(QUESTION))
    assert ANSWER in whole.text
    assert "".join(part.delta or "" for part in parts) == whole.text


async def test_a_chat_runs_asynchronously(make: Make) -> None:
    messages = [ChatMessage(QUESTION)]
    whole = await make().achat(messages)
    parts = [part async for part in await make().astream_chat(messages)]
    assert ANSWER in (whole.message.content or "")
    assert "".join(part.delta or "" for part in parts) == whole.message.content


def test_a_plain_completion_streamed_joins_to_the_whole(options: dict[str, Any]) -> None:
    model = OpenAILike(is_chat_model=False, max_tokens=8, **options)
    whole = model.complete(BEGINNING)
    assert ANSWER in whole.text
    assert "".join(part.delta or "" for part in model.stream_complete(BEGINNING)) == whole.text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called(make: Make, streamed: bool) -> None:
    model = make()
    if streamed:
        *_, reply = model.stream_chat_with_tools([WEATHER], user_msg=TOOL_QUESTION)
    else:
        reply = model.chat_with_tools([WEATHER], user_msg=TOOL_QUESTION)
    calls = model.get_tool_calls_from_response(reply)
    assert [(call.tool_name, call.tool_kwargs) for call in calls] == [(NAME, ARGUMENTS)]


@pytest.mark.parametrize("streaming", [False, True])
async def test_agent_calls_a_tool_and_answers_with_its_result(make: Make, streaming: bool) -> None:
    agent = FunctionAgent(tools=[WEATHER], llm=make(), streaming=streaming)
    assert TOOL_ANSWER in str(await agent.run(TOOL_QUESTION))


def test_errors_are_the_clients_own(make: Make) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        make(model=MISSING).complete(QUESTION)
    with pytest.raises(openai.BadRequestError) as too_long:
        make().complete(TOO_LONG)
    assert too_long.value.code == "context_length_exceeded"


FORMS = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)


def check_structured(model: FunctionCallingLLM) -> None:
    assert model.structured_predict(Person, PromptTemplate("{question}"), question=PERSON_QUESTION) == PERSON
    assert model.as_structured_llm(Person).complete(PERSON_QUESTION).raw == PERSON
    *_, last = model.stream_structured_predict(Person, PromptTemplate("{question}"), question=PERSON_QUESTION)
    assert last == PERSON


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_parsed_into_a_model(make: Make, form: PydanticProgramMode) -> None:
    """By a call that is asked for, of a function that LlamaIndex calls not strict."""
    check_structured(make(pydantic_program_mode=form))


def test_a_chat_is_parsed_by_its_schema(options: dict[str, Any]) -> None:
    check_structured(chat(**options, should_use_structured_outputs=True))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_is_forced(make: Make, streamed: bool) -> None:
    model, options = make(), {"user_msg": QUESTION, "tool_required": True}
    if streamed:
        *_, reply = model.stream_chat_with_tools([WEATHER], **options)
    else:
        reply = model.chat_with_tools([WEATHER], **options)
    (call,) = model.get_tool_calls_from_response(reply)
    assert call.tool_name == NAME
    assert list(call.tool_kwargs) == ["city"]


def test_messages_with_images_are_answered(make: Make, seeing_url: str) -> None:
    model = make(model=SEEING, api_base=seeing_url)
    blocks = [TextBlock(text=PICTURE_QUESTION), ImageBlock(image=PICTURE)]
    reply = model.chat([ChatMessage(role="user", blocks=blocks)])
    assert reply.message.content == PICTURE_ANSWER
