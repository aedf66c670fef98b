# SPDX-License-Identifier: Apache-2.0
"""The model of smolagents; its agents force tool calls."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import openai
import pytest
from smolagents import OpenAIModel, Tool, ToolCallingAgent
from smolagents.agents import ToolOutput
from smolagents.memory import ActionStep, FinalAnswerStep
from smolagents.models import agglomerate_stream_deltas

from tests.clients.world import (
    ANSWER,
    ARGUMENTS,
    DESCRIPTION,
    MISSING,
    MODEL,
    NAME,
    QUESTION,
    TOO_LONG,
    TOOL_ANSWER,
    TOOL_QUESTION,
    asked,
    get_weather,
)

BLOCKS = [{"type": "text", "text": QUESTION}]


def make(base_url: str, model: str = MODEL) -> OpenAIModel:
    return OpenAIModel(model, api_base=base_url, api_key="none", temperature=0)


def test_a_stream_joins_to_the_whole(base_url: str) -> None:
    messages = [{"role": "user", "content": BLOCKS}]
    whole = make(base_url).generate(messages)
    deltas = list(make(base_url).generate_stream(messages))
    assert ANSWER in whole.content
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    usages = [delta.token_usage for delta in deltas if delta.token_usage]
    assert usages == [whole.token_usage]


def test_errors_are_the_clients_own(base_url: str) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        make(base_url, MISSING).generate(asked(QUESTION))
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        make(base_url).generate(asked(TOO_LONG))


class Weather(Tool):
    """The tool of the included model."""

    name = NAME
    description = DESCRIPTION
    inputs: ClassVar[Any] = {"city": {"type": "string", "description": "The city."}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return get_weather(city)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_is_forced(base_url: str, streamed: bool) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": TOOL_QUESTION}]}]
    model = make(base_url)
    if streamed:
        deltas = list(model.generate_stream(messages, tools_to_call_from=[Weather()]))
        message = agglomerate_stream_deltas(deltas)
    else:
        message = model.generate(messages, tools_to_call_from=[Weather()])
    (call,) = message.tool_calls
    arguments = call.function.arguments
    assert call.function.name == NAME
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == ARGUMENTS


class Answer(Tool):
    """Ends the task, in words that the included model knows."""

    name = "final_answer"
    description = "Tell the weather of a city."
    inputs = Weather.inputs
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"{city}: {TOOL_ANSWER}"


def keep_to_the_answer(step: ActionStep, agent: ToolCallingAgent) -> None:
    """Behind the first step no other tool is left."""
    agent.tools = {Answer.name: agent.tools[Answer.name]}


@pytest.mark.parametrize("streamed", [False, True])
def test_agent_calls_its_tool_and_answers_with_the_result(base_url: str, streamed: bool) -> None:
    agent = ToolCallingAgent(
        [Weather(), Answer()],
        make(base_url),
        stream_outputs=streamed,
        verbosity_level=0,
        step_callbacks=[keep_to_the_answer],
    )
    agent.prompt_templates["system_prompt"] = ""
    steps = list(agent.run(TOOL_QUESTION, stream=True, max_steps=2))
    outputs = [step for step in steps if isinstance(step, ToolOutput)]
    calls = [(output.tool_call.name, output.tool_call.arguments) for output in outputs]
    assert calls == [(NAME, ARGUMENTS), (Answer.name, ARGUMENTS)]
    assert outputs[0].output == get_weather(**ARGUMENTS)
    assert isinstance(steps[-1], FinalAnswerStep)
    assert TOOL_ANSWER in steps[-1].output
