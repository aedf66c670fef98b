# SPDX-License-Identifier: Apache-2.0
"""Histories as they come: cut calls, reasoning among parts, results without calls, on every API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
PATHS = (CHAT, RESPONSES, MESSAGES, OLLAMA)
HI = {"role": "user", "content": "hi"}
SHOWS = """\
{%- for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}
{%- if m.reasoning_content %}{{ '<think>' ~ m.reasoning_content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ '<call>' ~ c.function.name ~ (c.function.arguments | tojson) }}{% endfor %}
{%- endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""
ABSENT = object()
NO_OBJECTS = [
    '{"city":"Par',
    '["Paris"]',
    "5",
    '"x"',
    "null",
    "",
    "{",
    "[" * 100_000,
    "1" * 5000,
    None,
    ABSENT,
]
OBJECTS = [("{}", "{}"), ('{"a": [1, {"b": null}]}', '{"a": [1, {"b": null}]}'), ({"a": "x"}, '{"a": "x"}')]


def body(path: str, arguments: Any) -> dict[str, Any]:
    """A conversation with an earlier call that has these arguments."""
    given = {} if arguments is ABSENT else {"arguments": arguments}
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "c", "name": "f", **given}
        return {"input": [HI, call, {"type": "function_call_output", "call_id": "c", "output": "42"}]}
    if path == MESSAGES:
        block = {"type": "tool_use", "id": "c", "name": "f", **({"input": arguments} if given else {})}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "42"}
        turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        return {"max_tokens": 9, "messages": [HI, *turns]}
    call = {"function": {"name": "f", **given}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "42"}]
    more = {"model": "fake-model", "stream": False} if path == OLLAMA else {}
    return {"messages": [HI, *turns], **more}


async def ask(path: str, request: dict[str, Any]) -> tuple[str, httpx.Response]:
    """The prompt, and the reply."""
    engine = FakeEngine(FakeTokenizer(SHOWS))
    async with client_for(engine, tool_call_parser="hermes") as client:
        response = await client.post(path, json=request)
        assert response.status_code == 200, response.text
        return engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"]), response


@folded("path", PATHS)
@folded("arguments", NO_OBJECTS, ids=lambda value: str(value)[:20])
async def test_earlier_arguments_that_are_no_object_are_empty(path: str, arguments: Any) -> None:
    prompt, response = await ask(path, body(path, arguments))
    assert prompt == "<user>hi<assistant><call>f{}<tool>42"
    names = {RESPONSES: "input[].arguments", MESSAGES: "messages[].content[].input"}
    name = names.get(path, "messages[].tool_calls[].function.arguments")
    assert response.json()["adjusted"][name] == "{}"


@folded("path", PATHS)
@folded(("arguments", "shown"), OBJECTS, ids=str)
async def test_earlier_arguments_that_are_an_object_are_kept(path: str, arguments: Any, shown: str) -> None:
    prompt, response = await ask(path, body(path, arguments))
    assert prompt == f"<user>hi<assistant><call>f{shown}<tool>42"
    assert "adjusted" not in response.json()


async def test_arguments_of_a_function_call_may_be_cut() -> None:
    called = {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a'}}
    prompt, _ = await ask(CHAT, {"messages": [HI, called, {"role": "function", "name": "g", "content": "1"}]})
    assert prompt == "<user>hi<assistant><call>f{}<tool>1"


@folded(
    ("parts", "thought"),
    [
        ([{"type": "thinking", "thinking": "hm", "signature": "s"}], "hm"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]}], "hm"),
        ([{"type": "reasoning", "reasoning": "hm"}], "hm"),
        ([{"type": "reasoning", "text": "hm"}], "hm"),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}], "hm"),
        ([{"type": "reasoning_text", "text": "hm"}], "hm"),
        ([{"type": "thinking", "thinking": "h"}, {"type": "redacted_thinking", "data": "x"},
          {"type": "thinking", "thinking": "m"}], "hm"),
        ([{"type": "redacted_thinking", "data": "x"}], ""),
        ([{"type": "thinking", "thinking": ""}], ""),
    ],
    ids=str,
)  # fmt: skip
async def test_parts_that_are_reasoning_are_the_reasoning(parts: list[Any], thought: str) -> None:
    turn = {"role": "assistant", "content": [*parts, {"type": "text", "text": "Hello."}]}
    prompt, _ = await ask(CHAT, {"messages": [HI, turn, HI]})
    assert prompt == f"<user>hi<assistant>Hello.{thought and '<think>' + thought}<user>hi"


@folded(
    ("messages", "where"),
    [
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}], "messages.0.content.0"),
        (
            [HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}],
            "messages.1.content.0.thinking",
        ),
        (
            [HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": [5]}]}],
            "messages.1.content.0.thinking",
        ),
        ([HI, {"role": "assistant", "content": [{"type": "image_url"}]}], "messages.1.content.0"),
        ([{"role": "user"}], "messages.0.content"),
        ([HI, {"role": "assistant", "refusal": 5}], "messages.1.refusal"),
    ],
    ids=str,
)
async def test_message_content_that_would_be_lost_is_refused(messages: list[Any], where: str) -> None:
    async with client_for(FakeEngine()) as client:
        response = await client.post(CHAT, json={"messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, where)


@folded(
    ("turn", "shown"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": []}, ""),
        ({"content": None, "refusal": "I won't."}, "I won't."),
        ({"content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None}, ""),
        ({"reasoning_content": "hm"}, "<think>hm"),
    ],
    ids=str,
)
async def test_an_answer_without_content_is_taken(turn: dict[str, Any], shown: str) -> None:
    prompt, _ = await ask(CHAT, {"messages": [HI, {"role": "assistant", **turn}, HI]})
    assert prompt == f"<user>hi<assistant>{shown}<user>hi"


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"messages": [HI, {"role": "tool", "tool_call_id": "a", "content": "1"}]}, "messages[].tool_call_id"),
        (RESPONSES, {"input": [HI, {"type": "function_call_output", "call_id": "a", "output": "1"}]},
         "input[].call_id"),
        (
            MESSAGES,
            {"max_tokens": 9, "messages": [HI, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "1"}]}]},
            "messages[].content[].tool_use_id",
        ),
        (OLLAMA, {"model": "fake-model", "stream": False, "messages": [HI, {"role": "tool", "content": "1"}]},
         "messages[].tool_call_id"),
    ],
)  # fmt: skip
async def test_result_without_a_call_is_kept_and_reported(
    path: str, fields: dict[str, Any], name: str
) -> None:
    prompt, response = await ask(path, fields)
    assert prompt == "<user>hi<tool>1"
    assert response.json()["adjusted"] == {name: "kept without a call"}
    assert name in response.headers["x-quire-adjusted-fields"]


@folded("role", ["user", "assistant"])
@folded("path", PATHS)
async def test_turns_in_a_row_are_joined_on_every_api(path: str, role: str) -> None:
    alternates = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    turns = [HI, {"role": role, "content": "one"}, {"role": role, "content": "two"}, HI]
    fields = {
        RESPONSES: {"input": turns},
        MESSAGES: {"max_tokens": 9, "messages": turns},
        OLLAMA: {"model": "fake-model", "stream": False, "messages": turns},
    }
    engine = FakeEngine(FakeTokenizer(alternates))
    async with client_for(engine) as client:
        response = await client.post(path, json=fields.get(path, {"messages": turns}))
    assert response.status_code == 200, response.text
    prompt = engine.tokenizer.decode(engine.seen[-1][0]["prompt_token_ids"])
    as_user, as_assistant = "<user>hi\n\none\n\ntwo\n\nhi", "<user>hi<assistant>one\n\ntwo<user>hi"
    assert prompt == (as_user if role == "user" else as_assistant)
    name = "input[]" if path == RESPONSES else "messages[]"
    assert response.json()["adjusted"] == {name: "consecutive ones of one role are joined"}


@pytest.mark.parametrize("item", [{"content": None}, {}, {"content": ""}, {"content": []}], ids=str)
async def test_responses_answer_without_content_is_empty(item: dict[str, Any]) -> None:
    answer = {"type": "message", "role": "assistant", **item}
    prompt, _ = await ask(RESPONSES, {"input": [HI, answer, HI]})
    assert prompt == "<user>hi<assistant><user>hi"


async def test_responses_user_without_content_is_refused() -> None:
    async with client_for(FakeEngine()) as client:
        response = await client.post(RESPONSES, json={"input": [HI, {"role": "user", "content": None}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input.1.content")


SURROGATES = [
    ('{"a":"\\ud800"}', '{"a": "\ufffd"}'),
    ('{"a\\uDFFF":["x\\ud83d"]}', '{"a\ufffd": ["x\ufffd"]}'),
    ('{"a":"\\udc00\\ud800"}', '{"a": "\ufffd\ufffd"}'),
]


@folded("path", [CHAT, RESPONSES])
@folded(("arguments", "shown"), SURROGATES)
async def test_earlier_lone_surrogates_are_replaced_and_reported(
    path: str, arguments: str, shown: str
) -> None:
    prompt, response = await ask(path, body(path, arguments))
    assert prompt == f"<user>hi<assistant><call>f{shown}<tool>42"
    name = "input[].arguments" if path == RESPONSES else "messages[].tool_calls[].function.arguments"
    assert response.json()["adjusted"] == {name: "U+FFFD in place of lone surrogates"}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_earlier_surrogate_pair_is_one_character(path: str) -> None:
    prompt, response = await ask(path, body(path, '{"a":"\\ud83d\\ude00"}'))
    assert prompt == '<user>hi<assistant><call>f{"a": "\U0001f600"}<tool>42'
    assert "adjusted" not in response.json()


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_earlier_number_beyond_a_double_keeps_digits(path: str) -> None:
    prompt, _ = await ask(path, body(path, '{"a": 1e400, "b": 1.5}'))
    assert prompt == '<user>hi<assistant><call>f{"a": "1e400", "b": 1.5}<tool>42'


@folded("digits", ["9" * 21, "1" + "0" * 29, "-" + "7" * 299])
@folded("path", PATHS)
async def test_earlier_integers_of_many_digits_are_kept(path: str, digits: str) -> None:
    text = f'{{"a": {digits}}}'
    given = text if path in (CHAT, RESPONSES) else {"a": int(digits)}
    prompt, response = await ask(path, body(path, given))
    assert prompt == f"<user>hi<assistant><call>f{text}<tool>42"
    assert "adjusted" not in response.json()
