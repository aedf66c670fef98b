# SPDX-License-Identifier: Apache-2.0
"""Pydantic AI, over each of the APIs that the server speaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelNotFoundError
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.ollama import OllamaModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.world import (
    ANSWER,
    ARGUMENTS,
    MISSING,
    MODEL,
    NAME,
    PERSON,
    PERSON_QUESTION,
    QUESTION,
    TOO_LONG,
    TOOL_ANSWER,
    TOOL_QUESTION,
    Person,
    get_weather,
)

Make = Callable[[str, str], Model]
NATIVE: Any = {"supports_json_schema_output": True}
"""What Pydantic AI believes of Anthropic's own models only."""
MODELS: dict[str, Make] = {
    "chat": lambda name, url: OpenAIChatModel(
        name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    ),
    "responses": lambda name, url: OpenAIResponsesModel(
        name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    ),
    "anthropic": lambda name, url: AnthropicModel(
        name, provider=AnthropicProvider(base_url=url, api_key="none"), profile=NATIVE
    ),
    "ollama": lambda name, url: OllamaModel(name, provider=OllamaProvider(base_url=f"{url}/v1")),
}


@pytest.fixture(params=MODELS)
def make_agent(request: pytest.FixtureRequest, server: str) -> Callable[..., Agent]:
    def make(model: str = MODEL, **options: Any) -> Agent:
        settings: Any = {"temperature": 0.0, "max_tokens": 64}
        return Agent(MODELS[request.param](model, server), model_settings=settings, **options)

    return make


async def test_a_run_streamed_joins_to_the_whole(make_agent: Callable[..., Agent]) -> None:
    whole = await make_agent().run(QUESTION)
    assert ANSWER in whole.output
    async with make_agent().run_stream(QUESTION) as stream:
        text = "".join([delta async for delta in stream.stream_text(delta=True)])
        usage = stream.usage
    assert text == whole.output
    assert usage.total_tokens == whole.usage.total_tokens > 0


async def test_tool_is_called_and_its_result_is_in_the_answer(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(tools=(get_weather,))
    whole = await agent.run(TOOL_QUESTION)
    calls = [
        part for message in whole.all_messages() for part in message.parts if isinstance(part, ToolCallPart)
    ]
    assert [(call.tool_name, call.args_as_dict()) for call in calls] == [(NAME, ARGUMENTS)]
    assert TOOL_ANSWER in whole.output
    async with agent.run_stream(TOOL_QUESTION) as stream:
        assert await stream.get_output() == whole.output


async def test_an_overlong_prompt_exceeds_the_context_window(make_agent: Callable[..., Agent]) -> None:
    with pytest.raises(ModelContextWindowExceededError):
        await make_agent().run(TOO_LONG)
    with pytest.raises(ModelContextWindowExceededError):
        async with make_agent().run_stream(TOO_LONG):
            pass


async def test_a_missing_model_is_not_found(make_agent: Callable[..., Agent]) -> None:
    with pytest.raises(ModelNotFoundError, match=MODEL):
        await make_agent(MISSING).run(QUESTION)


@pytest.mark.parametrize("form", [NativeOutput, ToolOutput, PromptedOutput])
async def test_an_output_is_parsed_into_a_model(make_agent: Callable[..., Agent], form: Any) -> None:
    agent = make_agent(output_type=form(Person))
    assert (await agent.run(PERSON_QUESTION)).output == PERSON
    async with agent.run_stream(PERSON_QUESTION) as stream:
        assert await stream.get_output() == PERSON
