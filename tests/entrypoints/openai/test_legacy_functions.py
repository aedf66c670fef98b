# SPDX-License-Identifier: Apache-2.0
"""`functions` and `function_call` with the stock `openai` client: what worked before tools works."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.entrypoints.openai.fake_engine import TEMPLATE, FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import live_server

HI: list[Any] = [{"role": "user", "content": "hi"}]
FUNCTION: dict[str, Any] = {
    "name": "f",
    "description": "Does f.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLS_SHOWN = TEMPLATE.replace(
    "message.content ~", "message.content ~ (message.tool_calls | tojson if message.tool_calls else '') ~"
).replace("message.role ~", "message.role ~ (message.tool_call_id or '') ~")


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(FakeTokenizer(CALLS_SHOWN))
    engine.reply = lambda prompt, index: f"I look.\n{CALL}\n{CALL}"
    return engine


@pytest.fixture
async def chat(engine: FakeEngine) -> AsyncIterator[openai.resources.chat.AsyncCompletions]:
    async with (
        live_server(engine) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5) as client,
    ):
        yield client.chat.completions


def prompt_of(engine: FakeEngine) -> str:
    return bytes(i for i in engine.seen[-1][0]["prompt_token_ids"] if i < 256).decode()


async def test_call_is_returned_as_a_function_call(chat: Any, engine: FakeEngine) -> None:
    answer = await chat.create(model="fake-model", messages=HI, functions=[FUNCTION], function_call="auto")
    (choice,) = answer.choices
    assert choice.finish_reason == "function_call"
    assert choice.message.content == "I look."
    assert choice.message.tool_calls is None
    assert choice.message.function_call.name == "f"
    assert json.loads(choice.message.function_call.arguments) == {"a": 1}
    assert '"Does f."' in prompt_of(engine)


async def test_the_deltas_have_the_same_call(chat: Any) -> None:
    chunks = await chat.create(model="fake-model", messages=HI, functions=[FUNCTION], stream=True)
    choices = [chunk.choices[0] async for chunk in chunks]
    called = [choice.delta.function_call for choice in choices if choice.delta.function_call]
    assert [(call.name, json.loads(call.arguments)) for call in called] == [("f", {"a": 1})]
    assert not any(choice.delta.tool_calls for choice in choices)
    assert choices[-1].finish_reason == "function_call"


async def test_none_calls_nothing(chat: Any, engine: FakeEngine) -> None:
    answer = await chat.create(model="fake-model", messages=HI, functions=[FUNCTION], function_call="none")
    assert answer.choices[0].message.function_call is None
    assert answer.choices[0].finish_reason == "stop"
    assert "Does f." not in prompt_of(engine)


async def test_calls_and_results_of_earlier_turns_reach_the_template(chat: Any, engine: FakeEngine) -> None:
    messages = [
        *HI,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "forty-two"},
    ]
    await chat.create(model="fake-model", messages=messages, functions=[FUNCTION])
    prompt = prompt_of(engine)
    assert '"function": {"name": "f", "arguments": {"a": 1}}' in prompt
    assert "toolcall00001" in prompt
    assert "forty-two" in prompt


async def test_answer_can_be_sent_back_with_its_result(chat: Any) -> None:
    answer = await chat.create(model="fake-model", messages=HI, functions=[FUNCTION])
    message = answer.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "function", "name": "f", "content": "1"}
    again = await chat.create(model="fake-model", messages=[*HI, message, result], functions=[FUNCTION])
    assert again.choices[0].finish_reason == "function_call"


async def test_errors_are_in_the_words_of_functions(chat: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await chat.create(model="fake-model", messages=HI, functions=[FUNCTION, FUNCTION])
    assert bad.value.param == "functions.1.name"
    assert "functions.1.name" in bad.value.message
    assert "tools" not in bad.value.message


@pytest.mark.parametrize("calls", ["", {}, 0, False, [{"function": {"name": "f"}}]])
async def test_a_message_has_calls_of_one_kind(chat: Any, calls: Any) -> None:
    message = {"role": "assistant", "function_call": {"name": "f"}, "tool_calls": calls}
    with pytest.raises(openai.BadRequestError) as bad:
        await chat.create(model="fake-model", messages=[*HI, message])
    assert bad.value.param == "messages.1.function_call"
