# SPDX-License-Identifier: Apache-2.0
"""Constraints over HTTP: with OpenAI's own client, in every form, under attack, and across the death of a core."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import httpx
import openai
import pydantic
import pytest

from tests.end_to_end.server import Server

HI: list[Any] = [{"role": "user", "content": "Tell me about Paris."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "n"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/v1/chat/completions", {"structured_outputs": {"json": SCHEMA}}),
    ("/v1/chat/completions", {"guided_json": SCHEMA}),
    ("/v1/completions", {"json_schema": SCHEMA}),
    ("/v1/completions", {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    ("/v1/responses", {"structured_outputs": {"json": SCHEMA}}),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/api/chat", {"format": SCHEMA}),
    ("/api/generate", {"format": SCHEMA}),
]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Paris: ", "max_tokens": 120},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Tell me about Paris."},
    "/v1/messages": {"messages": HI, "max_tokens": 120},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "Tell me about Paris.", "stream": False},
}
HOSTILE: list[dict[str, Any]] = [
    {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    {"json": {"type": "integer", "multipleOf": 99_998_300}},
    {"json": {"$ref": "#"}},
    {"json": {"$ref": "http://localhost/x"}},
    {"json": {"enum": [f"value {i}" for i in range(20_000)]}},
    {"json": '{"items":' * 9000 + "{}" + "}" * 9000},
    {"grammar": "start: " + "[" * 20_000},
]


def text_of(reply: Any) -> str:
    """The text, wherever an API has it: the longest of all texts that are JSON objects."""
    texts = [value for value in _strings(reply) if value.startswith("{")]
    return max(texts, key=len)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(inner)


@pytest.mark.parametrize(
    ("path", "fields"), FORMS, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
def test_every_api_keeps_to_a_schema(demo_server: Server, path: str, fields: dict[str, Any]) -> None:
    reply = httpx.post(
        f"{demo_server.url}{path}", json={"model": "quire-demo", **BASES[path], **fields}, timeout=180
    )
    assert reply.status_code == 200, reply.text
    body = {name: value for name, value in reply.json().items() if name not in ("text", "usage")}
    assert set(json.loads(text_of(body))) == {"city", "n"}
    assert "ignored" not in reply.json()


@pytest.fixture
def client(demo_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=180
    ) as client:
        yield client


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    inhabitants: int = pydantic.Field(ge=0, le=10**8)
    sights: list[Annotated[str, pydantic.Field(max_length=20)]] = pydantic.Field(max_length=3)


THINKING_OFF: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"reasoning_effort": "none"}),
    ("/v1/chat/completions", {"enable_thinking": False}),
    ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("/v1/responses", {}),
    ("/v1/responses", {"reasoning": {"effort": "none"}}),
    ("/v1/messages", {}),
    ("/v1/messages", {"thinking": {"type": "disabled"}}),
    ("/api/chat", {}),
    ("/api/chat", {"think": False}),
    ("/api/generate", {"think": False}),
]
SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"temperature": 0, "max_tokens": 6},
    "/v1/responses": {"temperature": 0, "max_output_tokens": 6},
    "/v1/messages": {"temperature": 0, "max_tokens": 6},
    "/api/chat": {"options": {"temperature": 0, "num_predict": 6}},
    "/api/generate": {"options": {"temperature": 0, "num_predict": 6}},
}
TURNS = ("hi", "What is the capital of France?", "Is Paris the capital of France?", "What is 47 - 38?")


@pytest.mark.parametrize(("path", "off"), THINKING_OFF, ids=str)
def test_constraint_without_thinking_starts_at_once(
    demo_server: Server, path: str, off: dict[str, Any]
) -> None:
    form = next(fields for known, fields in FORMS if known == path)
    for turn in TURNS:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": turn}]}
        if path in ("/v1/responses", "/api/generate"):
            asked = {"input" if path == "/v1/responses" else "prompt": turn}
        body = {"model": "quire-demo", **BASES[path], **SHORT[path], **form, **off, **asked}
        answer = httpx.post(demo_server.url + path, json=body, timeout=60).json()
        assert text_of(answer)
        assert not any(word in str(answer) for word in ("'thinking'", "reasoning_text", "reasoning_content"))


def test_openai_client_parses_the_requested_format(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="quire-demo", messages=HI, response_format=City, temperature=1.2, seed=seed, max_tokens=900
        )
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, City)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"extra_body": {"guided_regex": "[a-z]{3,9}( [a-z]{2,5}){2}"}, "logprobs": True},
        {"extra_body": {"structured_outputs": {"choice": ["Paris", "Parma"]}}, "n": 3},
        {"tools": [TOOL, OTHER], "tool_choice": "required", "parallel_tool_calls": False},
    ],
    ids=["schema", "regex", "choice", "calls"],
)
def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    shared: Any = {
        "model": "quire-demo",
        "messages": HI,
        "seed": 5,
        "temperature": 1.0,
        "max_tokens": 200,
        **fields,
    }
    whole = client.chat.completions.create(**shared)
    contents = {choice.index: choice.message.content or "" for choice in whole.choices}
    calls = {c.index: _calls(c.message.tool_calls) for c in whole.choices}
    streamed, streamed_calls = dict.fromkeys(contents, ""), {index: list[Any]() for index in contents}
    for chunk in client.chat.completions.create(stream=True, **shared):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            streamed_calls[choice.index] += _calls(choice.delta.tool_calls)
    assert streamed == contents
    assert streamed_calls == calls


def _calls(calls: Any) -> list[Any]:
    return [(call.function.name, call.function.arguments) for call in calls or []]


def test_calls_that_are_required_come_with_good_arguments(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.create(
            model="quire-demo", messages=HI, tools=[TOOL, OTHER], tool_choice="required", temperature=1.0, seed=seed,
            parallel_tool_calls=False, max_tokens=400,
        )  # fmt: skip
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        ((name, arguments),) = _calls(choice.message.tool_calls)
        assert name in ("look_up", "now")
        assert isinstance(json.loads(arguments), dict)
        assert not choice.message.content


def test_a_named_function_is_the_one_that_is_called(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "look_up"}}
    answer = client.chat.completions.create(
        model="quire-demo", messages=HI, tools=[OTHER, TOOL], tool_choice=named, temperature=1.0, seed=1
    )
    ((name, arguments),) = _calls(answer.choices[0].message.tool_calls)
    assert name == "look_up"
    assert set(json.loads(arguments)) == {"city", "n"}


def test_strict_function_call_fits_its_schema_or_is_absent(client: openai.OpenAI) -> None:
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    for seed in range(4):
        answer = client.chat.completions.create(
            model="quire-demo", messages=question, tools=[strict], temperature=1.0, seed=seed, max_tokens=200
        )
        for name, arguments in _calls(answer.choices[0].message.tool_calls):
            assert name == "look_up"
            assert set(json.loads(arguments)) == {"city", "n"}


def completion(server: Server, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", **fields}, timeout=180)


def test_hostile_constraints_are_refused_while_others_go_on(demo_server: Server) -> None:
    body = {"max_tokens": 400, "seed": 3, "temperature": 1.0, "ignore_eos": True}
    expected = completion(demo_server, body).json()["choices"]
    with ThreadPoolExecutor(16) as pool:
        attacks = [pool.submit(completion, demo_server, {"structured_outputs": one}) for one in HOSTILE]
        others = [pool.submit(completion, demo_server, body) for _ in range(4)]
        replies = [attack.result() for attack in attacks]
    assert [reply.status_code for reply in replies] == [400] * len(HOSTILE)
    for reply in replies:
        error = reply.json()["error"]
        assert error["param"].startswith("structured_outputs.")
        assert len(error["message"]) < 600
    assert [other.result().json()["choices"] for other in others] == [expected] * 4
    assert demo_server.health() == 200


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_checker_that_is_lost_costs_no_constraint(demo_server: Server, number: signal.Signals) -> None:
    wanted = {"regex": f"hello[0-9]{{{number}}}"}
    assert completion(demo_server, {"structured_outputs": {"regex": f"a{{{number}}}"}}).status_code == 200
    for pid in demo_server.children("quire.structured_output.check_process"):
        os.kill(pid, number)
    for _ in range(2):
        reply = completion(demo_server, {"structured_outputs": wanted, "max_tokens": 60})
        assert reply.status_code == 200, reply.text


LARGE: dict[str, dict[str, Any]] = {
    "choice": {"choice": [f"label {number}" for number in range(2000)]},
    "open": {
        "json": {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(500)}}
    },
    "closed": {
        "json": {
            "type": "object",
            "properties": {f"p{number}": {"type": "null"} for number in range(1500)},
            "additionalProperties": False,
        }
    },
    "rules": {"grammar": "start: " + " | ".join(f'"a{number}"' for number in range(1980))},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_constraint_is_generated(demo_server: Server, name: str) -> None:
    body = {"structured_outputs": LARGE[name], "max_tokens": 60, "temperature": 1.5, "seed": 1}
    reply = completion(demo_server, body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_ambiguous_grammar_ends_with_its_reason(demo_server: Server) -> None:
    """Its steps take the longer the longer the text is; other requests go on."""
    other = {"max_tokens": 300, "seed": 3, "temperature": 1.0, "ignore_eos": True}
    expected = completion(demo_server, other).json()["choices"]
    grammar = 'start: e\ne: e e | e e e | "a"'
    with ThreadPoolExecutor(2) as pool:
        attack = pool.submit(
            completion,
            demo_server,
            {"structured_outputs": {"grammar": grammar}, "max_tokens": 900, "ignore_eos": True},
        )
        assert completion(demo_server, other).json()["choices"] == expected
        reply = attack.result()
    assert reply.status_code == 400
    assert "CPU time per step; make the grammar less ambiguous" in reply.text


@pytest.mark.more
def test_a_constrained_stream_goes_on_in_a_new_core(tmp_path: Path) -> None:
    server = Server("--no-enable-prefix-caching", log=tmp_path / "log").wait_ready()
    pattern = "(?:[a-z]{2,7} ){60,80}"
    body = {
        "prompt": "x",
        "structured_outputs": {"regex": pattern},
        "max_tokens": 500,
        "seed": 2,
        "temperature": 1.0,
    }
    expected = httpx.post(f"{server.url}/v1/completions", json=body, timeout=180).json()["choices"][0]
    text = ""
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=180
    ) as reply:
        for number, line in enumerate(line for line in reply.iter_lines() if line.startswith("data: {")):
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if number == 5:
                core = server.core_pid()
                assert core is not None
                os.kill(core, signal.SIGKILL)
    assert text == expected["text"]
    assert re.fullmatch(pattern, text)
    assert server.stop() == 0, server.log.read_text()
