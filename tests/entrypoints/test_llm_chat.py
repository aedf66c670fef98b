# SPDX-License-Identifier: Apache-2.0
"""`LLM.chat` reads the answers as the server does."""

from __future__ import annotations

import json

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ValidationError

GREEDY = SamplingParams(temperature=0, max_tokens=60)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("quire-demo", max_model_len=512, max_num_seqs=4, kv_cache_memory_bytes=16 * 2**20)


def test_tool_call_is_separated_from_content(llm: LLM) -> None:
    (output,) = llm.chat(ASK, GREEDY, use_tqdm=False, tools=[TOOL])
    answer = output.outputs[0].answer
    assert answer is not None
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments), answer.content) == ("get_weather", {"city": "Paris"}, "")


def test_without_tools_an_answer_is_its_text(llm: LLM) -> None:
    conversations = [ASK, [{"role": "user", "content": "What is the capital of France?"}]]
    for output in llm.chat(conversations, GREEDY, use_tqdm=False):
        answer = output.outputs[0].answer
        assert answer is not None
        assert (answer.content, answer.reasoning, answer.tool_calls) == (output.outputs[0].text, "", ())


@pytest.mark.parametrize(
    "tools", [[TOOL, TOOL], [{"type": "function"}], [{"function": {"name": "f", "parameters": 5}}]]
)
def test_invalid_tools_are_refused_before_any_request(llm: LLM, tools: list[dict[str, object]]) -> None:
    with pytest.raises(ValidationError, match="tools"):
        llm.chat(ASK, GREEDY, use_tqdm=False, tools=tools)


def test_prompts_of_a_wrong_type_are_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match=r"a prompt is a text or a list of token ids, got 5"):
        llm.generate(5)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"must be a list of .*, got one message"):
        llm.chat({"role": "user", "content": "hi"})  # type: ignore[arg-type]


def test_unknown_parser_is_reported_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser"):
        LLM("quire-demo", tool_call_parser="nonsense")
