# SPDX-License-Identifier: Apache-2.0
"""The requests of coding agents, sent by the clients that they are built on: two turns with tools, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.world import (
    ARGUMENTS,
    DESCRIPTION,
    MODEL,
    NAME,
    PARAMETERS,
    TOOL_ANSWER,
    TOOL_QUESTION,
    get_weather,
    said_by,
)

CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: Any = {
    "model": MODEL,
    "max_tokens": 128,
    "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
    "tools": [
        {"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"device_id": "0", "session_id": "1"}'},
    "thinking": {"type": "disabled"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "extra_body": {"temperature": 0},
}
CODEX: Any = {
    "model": MODEL,
    "max_output_tokens": 128,
    "temperature": 0,
    "parallel_tool_calls": False,
    "reasoning": {"effort": "none", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "service_tier": "auto",
    "text": {"verbosity": "low"},
    "extra_body": {"client_metadata": {"x-codex-installation-id": "1"}},
}
FUNCTION: Any = {
    "type": "function", "name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS, "strict": False,
}  # fmt: skip
WEB_SEARCH: Any = {"type": "web_search", "external_web_access": False}
NAMESPACE: Any = {"type": "namespace", "name": "mcp__world", "description": "", "tools": [FUNCTION]}


@pytest.fixture
def claude(server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def codex(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_claude_code_calls_a_tool_and_reads_its_result(claude: anthropic.Anthropic) -> None:
    def step(messages: list[Any]) -> Any:
        with claude.beta.messages.stream(**CLAUDE, messages=messages) as stream:
            return stream.get_final_message()

    question = [{"type": "text", "text": TOOL_QUESTION, **CACHED}]
    messages = [said_by("user", question), said_by("system", [{"type": "text", "text": "Be brief."}])]
    messages.reverse()  # the included model answers what was said last
    first = step(messages)
    (call,) = first.content
    assert (first.stop_reason, call.type, call.name, call.input) == ("tool_use", "tool_use", NAME, ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**ARGUMENTS)}
    second = step([*messages, said_by("assistant", first.content), said_by("user", [result])])
    assert TOOL_ANSWER in second.content[-1].text


def test_a_system_message_behind_the_question_is_taken(claude: anthropic.Anthropic) -> None:
    messages: Any = [said_by("user", TOOL_QUESTION), said_by("system", "Be brief.")]
    counted = claude.beta.messages.count_tokens(model=MODEL, messages=messages, tools=CLAUDE["tools"])
    whole = claude.beta.messages.create(**CLAUDE, messages=messages)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("tool", [FUNCTION, NAMESPACE], ids=["function", "namespace"])
def test_codex_calls_a_tool_and_reads_its_result(codex: openai.OpenAI, tool: Any) -> None:
    is_in_namespace = tool["type"] == "namespace"
    choice: Any = {"type": "function", "name": NAME} | (
        {"namespace": tool["name"]} if is_in_namespace else {}
    )

    def step(items: list[Any], tool_choice: Any) -> Any:
        request: Any = {**CODEX, "tools": [tool, WEB_SEARCH], "tool_choice": tool_choice}
        with codex.responses.stream(**request, input=items) as stream:
            return stream.get_final_response()

    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TOOL_QUESTION}]},
    ]
    first = step(items, choice)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", NAME)
    assert call.namespace == (tool["name"] if is_in_namespace else None)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": get_weather(**ARGUMENTS)}
    second = step([*items, call.model_dump(exclude_none=True, exclude={"parsed_arguments"}), result], "auto")
    assert second.status == "completed"
    assert second.output_text
