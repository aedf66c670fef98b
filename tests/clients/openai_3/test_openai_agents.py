# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Agents SDK, over chat completions and over the Responses API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import agents
import openai
import pytest

from tests.clients.world import (
    ANSWER,
    MISSING,
    MODEL,
    PERSON,
    PERSON_QUESTION,
    QUESTION,
    TOO_LONG,
    TOOL_ANSWER,
    TOOL_QUESTION,
    Person,
    get_weather,
)

Make = Callable[..., "agents.Agent[Any]"]


@pytest.fixture(params=[agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
async def make_agent(request: pytest.FixtureRequest, base_url: str) -> AsyncIterator[Make]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        def make(model: str = MODEL, tools: tuple[Any, ...] = ()) -> agents.Agent[Any]:
            return agents.Agent(
                name="demo",
                model=request.param(model=model, openai_client=client),
                tools=[agents.function_tool(tool) for tool in tools],
                model_settings=agents.ModelSettings(temperature=0, include_usage=True),
            )

        yield make


async def streamed(agent: agents.Agent[Any], question: str) -> tuple[str, agents.RunResultStreaming]:
    """The text of the deltas, and the run when it is over."""
    run = agents.Runner.run_streamed(agent, question)
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return "".join(deltas), run


async def test_a_run_streamed_joins_to_the_whole(make_agent: Make) -> None:
    whole = await agents.Runner.run(make_agent(), QUESTION)
    text, run = await streamed(make_agent(), QUESTION)
    assert ANSWER in whole.final_output
    assert text == run.final_output == whole.final_output
    used, usage = run.context_wrapper.usage.total_tokens, whole.context_wrapper.usage
    assert used == usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


async def test_tool_is_called_and_its_result_is_in_the_answer(make_agent: Make) -> None:
    agent = make_agent(tools=(get_weather,))
    whole = await agents.Runner.run(agent, TOOL_QUESTION)
    text, run = await streamed(agent, TOOL_QUESTION)
    assert TOOL_ANSWER in whole.final_output
    assert text == run.final_output == whole.final_output
    items = ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert [item.type for item in whole.new_items] == [item.type for item in run.new_items] == items


async def test_errors_are_the_clients_own(make_agent: Make) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        await agents.Runner.run(make_agent(MISSING), QUESTION)
    with pytest.raises(openai.BadRequestError) as whole:
        await agents.Runner.run(make_agent(), TOO_LONG)
    with pytest.raises(openai.BadRequestError) as in_stream:
        await streamed(make_agent(), TOO_LONG)
    assert whole.value.code == in_stream.value.code == "context_length_exceeded"


async def test_an_output_is_parsed_into_a_model(make_agent: Make) -> None:
    agent = make_agent().clone(output_type=Person)
    assert (await agents.Runner.run(agent, PERSON_QUESTION)).final_output == PERSON
    _, run = await streamed(agent, PERSON_QUESTION)
    assert run.final_output == PERSON


@pytest.mark.parametrize("choice", ["required", "get_weather"])
async def test_a_call_is_forced(make_agent: Make, choice: str) -> None:
    agent = make_agent(tools=(get_weather,))
    settings = agent.model_settings.resolve(agents.ModelSettings(tool_choice=choice))
    agent = agent.clone(model_settings=settings, tool_use_behavior="stop_on_first_tool")
    whole = await agents.Runner.run(agent, QUESTION)
    _, run = await streamed(agent, QUESTION)
    assert json.loads(whole.final_output)["temperature"] == 21
    assert run.final_output == whole.final_output
