# SPDX-License-Identifier: Apache-2.0
"""LiteLLM, by each of the routes that lead to a server of one's own."""

from __future__ import annotations

import json
from typing import Any

import litellm
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
)

litellm.suppress_debug_info = True
ROUTES = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": "", "ollama_chat": ""}
"""LiteLLM's name of an API, to where the server has it."""


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, server: str) -> dict[str, Any]:
    return route_of(request.param, server)


@pytest.fixture
def openai_route(server: str) -> dict[str, Any]:
    return route_of("openai", server)


def route_of(name: str, server: str) -> dict[str, Any]:
    """Return LiteLLM's arguments that reach the served model by this route."""
    return {
        "model": f"{name}/{MODEL}",
        "api_base": server + ROUTES[name],
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 64,
        "num_retries": 0,
    }


def missing(route: dict[str, Any]) -> dict[str, Any]:
    return route | {"model": route["model"].replace(MODEL, MISSING)}


def rebuilt(chunks: list[Any]) -> Any:
    return litellm.stream_chunk_builder(chunks)


def test_a_stream_joins_to_the_whole(route: dict[str, Any]) -> None:
    request = route | {"messages": asked(QUESTION)}
    whole = litellm.completion(**request)
    streamed = litellm.completion(**request, stream=True, stream_options={"include_usage": True})
    streamed = rebuilt(list(streamed))
    assert ANSWER in whole.choices[0].message.content
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.usage.total_tokens == whole.usage.total_tokens > 0


async def test_a_completion_runs_asynchronously(route: dict[str, Any]) -> None:
    request = route | {"messages": asked(QUESTION)}
    whole = await litellm.acompletion(**request)
    chunks = [chunk async for chunk in await litellm.acompletion(**request, stream=True)]
    assert ANSWER in whole.choices[0].message.content
    assert rebuilt(chunks).choices[0].message.content == whole.choices[0].message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_is_called_and_its_result_is_in_the_answer(route: dict[str, Any], streamed: bool) -> None:
    def step(messages: list[Any]) -> Any:
        request = route | {"messages": messages, "tools": [CHAT_TOOL]}
        if not streamed:
            return litellm.completion(**request).choices[0]
        return rebuilt(list(litellm.completion(**request, stream=True))).choices[0]

    messages = asked(TOOL_QUESTION)
    first = step(messages)
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (NAME, ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call.id, "name": NAME, "content": get_weather(**ARGUMENTS)}
    assert TOOL_ANSWER in step([*messages, first.message.model_dump(), result]).message.content


def test_a_missing_model_is_not_found(route: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError, match=MODEL):
        litellm.completion(**missing(route), messages=asked(QUESTION))


@pytest.mark.parametrize("name", ["openai", "hosted_vllm", "anthropic"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_overlong_prompt_exceeds_the_context_window(server: str, name: str, streamed: bool) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**route_of(name, server), messages=asked(TOO_LONG), stream=streamed)


def test_overlong_prompt_falls_back_to_a_larger_context(openai_route: dict[str, Any]) -> None:
    larger = {
        "model_name": "larger",
        "litellm_params": openai_route | {"mock_response": "from the larger window"},
    }
    router = litellm.Router(
        model_list=[{"model_name": "small", "litellm_params": openai_route}, larger],
        context_window_fallbacks=[{"small": ["larger"]}],
        num_retries=0,
    )
    short = router.completion("small", asked(QUESTION))
    long = router.completion("small", asked(TOO_LONG))
    assert ANSWER in short.choices[0].message.content
    assert long.choices[0].message.content == "from the larger window"


def test_a_text_completion_streamed_joins_to_the_whole(server: str) -> None:
    route = route_of("openai", server) | {"model": f"text-completion-openai/{MODEL}", "max_tokens": 8}
    whole = litellm.text_completion(**route, prompt=BEGINNING)
    chunks = list(litellm.text_completion(**route, prompt=BEGINNING, stream=True))
    assert ANSWER in whole.choices[0].text
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text


class TestResponses:
    """The Responses API."""

    @pytest.fixture
    def request_fields(self, openai_route: dict[str, Any]) -> dict[str, Any]:
        left_out = ("max_tokens", "num_retries")
        return {name: value for name, value in openai_route.items() if name not in left_out}

    def test_a_stream_joins_to_the_whole(self, request_fields: dict[str, Any]) -> None:
        whole = litellm.responses(**request_fields, input=QUESTION)
        events = list(litellm.responses(**request_fields, input=QUESTION, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert ANSWER in text
        assert text == whole.output_text
        assert events[-1].type == "response.completed"
        assert events[-1].response.usage.total_tokens == whole.usage.total_tokens > 0

    def test_tool_is_called_and_its_result_is_in_the_answer(self, request_fields: dict[str, Any]) -> None:
        tool = {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}
        first = litellm.responses(**request_fields, input=asked(TOOL_QUESTION), tools=[tool])
        (call,) = first.output
        assert (call.name, json.loads(call.arguments)) == (NAME, ARGUMENTS)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": get_weather(**ARGUMENTS)}
        items = [*asked(TOOL_QUESTION), call.model_dump(), result]
        assert TOOL_ANSWER in litellm.responses(**request_fields, input=items, tools=[tool]).output_text

    def test_errors_are_the_clients_own(self, request_fields: dict[str, Any]) -> None:
        with pytest.raises(litellm.NotFoundError, match=MODEL):
            litellm.responses(**missing(request_fields), input=QUESTION)
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.responses(**request_fields, input=TOO_LONG)


@pytest.mark.parametrize("form", [Person, {"type": "json_object"}], ids=["schema", "json_object"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_has_the_format(route: dict[str, Any], form: Any, streamed: bool) -> None:
    request = route | {"messages": asked(PERSON_QUESTION), "response_format": form}
    done = litellm.completion(**request, stream=streamed)
    message = (rebuilt(list(done)) if streamed else done).choices[0].message
    assert Person.model_validate_json(message.content) == PERSON


# Ollama's API has no tool_choice.
@pytest.mark.parametrize("route", [name for name in ROUTES if name != "ollama_chat"], indirect=True)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Person"}}])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_is_forced(route: dict[str, Any], choice: Any, streamed: bool) -> None:
    tool = {"type": "function", "function": {"name": "Person", "parameters": STRICT_PERSON, "strict": True}}
    request = route | {"messages": asked(PERSON_QUESTION), "tools": [tool], "tool_choice": choice}
    done = litellm.completion(**request, stream=streamed)
    (call,) = (rebuilt(list(done)) if streamed else done).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("Person", PERSON.model_dump())
