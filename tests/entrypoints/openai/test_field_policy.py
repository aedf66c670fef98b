# SPDX-License-Identifier: Apache-2.0
"""Unsupported fields at any depth: accepted and reported, or refused if they would change the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.openai.field_rules import REFUSED
from quire.entrypoints.openai.notes import MAX_NOTES, RequestNotes
from quire.entrypoints.openai.parsing import filter_fields
from quire.entrypoints.openai.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
)
from quire.errors import ValidationError
from tests.entrypoints.openai.fake_engine import TEMPLATE, FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for, stream
from tests.fixtures.folded import folded

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HEADER = "x-quire-ignored-fields"


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"}, **fields}


IGNORED: list[tuple[dict[str, Any], list[str]]] = [
    ({"thinking": {"type": "disabled"}}, ["thinking"]),
    ({"enable_thinking": False}, ["enable_thinking"]),
    ({"reasoning": {"effort": "low"}}, ["reasoning"]),
    ({"reasoning_effort": "low"}, ["reasoning_effort"]),
    ({"num_ctx": 8192, "keep_alive": "5m"}, ["num_ctx", "keep_alive"]),
    ({"usage": {"include": True}}, ["usage"]),
    ({"verbosity": "low"}, ["verbosity"]),
    ({"user": "me", "metadata": {"a": "b"}, "store": False}, ["user", "metadata", "store"]),
    ({"prediction": {"type": "content", "content": "x"}}, ["prediction"]),
    ({"temprature": 1}, ["temprature"]),
    ({"evil\r\nx: y": 2}, ["evil\r\nx: y"]),
    ({"": 1}, [""]),
    ({"x" * 100: 2}, ["x" * 61 + "..."]),
    ({"chat_template_kwargs": {"enable_thinking": False, "shout": True}}, ["chat_template_kwargs.enable_thinking"]),
    ({"chat_template_kwargs": {"self": 1, "__class__": 1, "tokenize": True, "chat_template": "x"}},
     [f"chat_template_kwargs.{name}" for name in ("self", "__class__", "tokenize", "chat_template")]),
    (message(content=[{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b", "id": "1"}]),
     ["messages[].content[].cache_control", "messages[].content[].id"]),
    (message(cache_control={}, annotations=[], id="x", name="ann", foo=1),
     [f"messages[].{name}" for name in ("cache_control", "annotations", "id", "foo", "name")]),
    ({"messages": [*HI, {"role": "assistant", "content": None, "refusal": "no", "tool_calls": [{**CALL, "index": 0}]},
                   {"role": "tool", "tool_call_id": "1", "content": "x"}]},
     ["messages[].tool_calls[].index"]),
    ({"tools": [tool(strict=True, cache_control={})]}, ["tools[].strict", "tools[].cache_control"]),
    ({"tools": [tool(function={"name": name, "title": True}) for name in "fgh"]}, ["tools[].function.title"]),
    ({"stream": True, "stream_options": {"include_obfuscation": True, "foo": 1}},
     ["stream_options.include_obfuscation", "stream_options.foo"]),
]  # fmt: skip


@pytest.mark.item(11)
@folded(("fields", "names"), IGNORED, ids=lambda value: str(value)[:60])
async def test_field_without_effect_is_reported_in_header_and_reply(
    client: httpx.AsyncClient, fields: dict[str, Any], names: list[str]
) -> None:
    shown = ", ".join(name if name and name.isprintable() else "?" for name in names)
    body = {"messages": HI, **fields}
    streamed = await client.post(CHAT, json={**body, "stream": True})
    assert (streamed.status_code, streamed.headers[HEADER]) == (200, shown)
    chunks = await stream(client, CHAT, **body)
    assert [chunk["ignored"] for chunk in chunks if "ignored" in chunk] == [names]
    assert "ignored" in chunks[-1]
    whole = await client.post(CHAT, json={**body, "stream": False} | {"stream_options": None})
    names = [name for name in names if not name.startswith("stream_options")]
    assert (whole.status_code, whole.json().get("ignored", [])) == (200, names)


@pytest.mark.item(11)
@folded(("fields", "names"), IGNORED, ids=lambda value: str(value)[:60])
async def test_strict_policy_refuses_fields_without_effect(
    engine: FakeEngine, fields: dict[str, Any], names: list[str]
) -> None:
    async with client_for(engine, unknown_fields="reject") as client:
        response = await client.post(CHAT, json={"messages": HI, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, names[0])
    assert "unknown field" in response.json()["error"]["message"]
    assert not engine.seen


async def test_strict_policy_suggests_similar_field_names(engine: FakeEngine) -> None:
    async with client_for(engine, unknown_fields="reject") as client:
        typo = await client.post(COMPLETIONS, json={"prompt": "hi", "temprature": 1})
        inner = await client.post(CHAT, json={"messages": HI, "tools": [tool(function={"nam": "f"})]})
    assert "did you mean 'temperature'?" in typo.json()["error"]["message"]
    assert "did you mean 'name'?" in inner.json()["error"]["message"]


@folded(
    "fields",
    [
        {"tools": [], "tool_choice": "auto"},
        {"best_of": None, "suffix": "", "echo": False, "n": None},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [*HI, {"role": "assistant", "content": "x", "refusal": None, "audio": None}]},
        {"stream_options": {"include_usage": None}, "stream": True},
        {"response_format": {"type": "text"}, "modalities": ["text"], "functions": []},
    ],
)
async def test_field_with_the_default_effect_is_not_noted(fields: dict[str, Any]) -> None:
    async with client_for(FakeEngine(), unknown_fields="reject") as client:
        response = await client.post(CHAT, json={"messages": HI, **fields})
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers
    assert '"ignored"' not in response.text


@folded("name", REFUSED)
async def test_field_that_would_change_the_answer_is_refused(client: httpx.AsyncClient, name: str) -> None:
    """By a kind of request that has no such field."""
    kinds = [(COMPLETIONS, {"prompt": "hi"}, CompletionRequest), (CHAT, {"messages": HI}, ChatCompletionRequest),
             (TOKENIZE, {"prompt": "hi"}, TokenizeRequest)]  # fmt: skip
    path, base = next((path, base) for path, base, kind in kinds if name not in kind.model_fields)
    response = await client.post(path, json={**base, name: {"type": "something else"}})
    error = response.json()["error"]
    assert (response.status_code, error["param"].partition(".")[0]) == (400, name)
    assert error["message"].startswith(name)


async def test_a_suffix_is_refused_with_a_reason(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "hi", "suffix": "end"})
    assert response.status_code == 400
    assert "fill-in-the-middle" in response.json()["error"]["message"]


async def test_field_read_by_the_template_is_honored_unreported() -> None:
    source = TEMPLATE.replace(
        "message.role", "message.role ~ (message.name or '') ~ (reasoning_effort or '')"
    )
    engine = FakeEngine(FakeTokenizer(source))
    async with client_for(engine) as client:
        response = await client.post(CHAT, json={**message(name="ann"), "reasoning_effort": "high"})
    assert (response.status_code, response.headers.get(HEADER)) == (200, None)
    assert b"userannhigh" in bytes(i for i in engine.seen[0][0]["prompt_token_ids"] if i < 256)


async def test_ignored_field_does_not_reach_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for function in ({"name": "f"}, {"name": "f", "strict": False, "foo": 1}):
        await client.post(CHAT, json={"messages": HI, "tools": [tool(function=function, cache_control={})]})
    assert engine.seen[0][0] == engine.seen[1][0]


async def test_notes_are_bounded(client: httpx.AsyncClient) -> None:
    response = await client.post(
        COMPLETIONS, json={"prompt": "hi", **{f"f{index}": 1 for index in range(99)}}
    )
    assert response.json()["ignored"] == [*(f"f{index}" for index in range(32)), "and 67 more"]


names = st.sampled_from(
    [
        "messages",
        "tools",
        "function",
        "content",
        "tool_calls",
        "stream_options",
        "name",
        "type",
        "strict",
        "prefix",
        "x",
    ]
)
values = st.recursive(
    st.sampled_from([None, False, 1, "x", []]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=30,
)


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Names of all fields in it that have a value, in the form that notes have."""
    if isinstance(value, list):
        for item in value:
            yield from paths(item, f"{path}[]")
    elif isinstance(value, dict):
        for name, inner in value.items():
            if inner is not None:
                here = f"{path}.{name}" if path else name
                yield here
                yield from paths(inner, here)


@pytest.mark.item(11)
@pytest.mark.parametrize(("num_more", "told"), [(0, []), (1, ["and 1 more"]), (5000, ["and 1000 or more"])])
def test_ignored_fields_beyond_the_limit_are_counted(num_more: int, told: list[str]) -> None:
    notes = RequestNotes()
    for _ in range(2):  # each is one note
        for number in range(MAX_NOTES + num_more):
            notes.ignore(f"f{number}")
    assert notes.ignored == [f"f{number}" for number in range(MAX_NOTES)] + told
    ((_, header),) = notes.headers(is_error=False)
    assert header.decode().split(", ") == notes.ignored


@pytest.mark.item(11)
@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(body=st.dictionaries(names, values, max_size=5))
def test_every_field_is_honored_reported_or_refused(body: dict[str, Any]) -> None:
    notes = RequestNotes()
    try:
        kept = filter_fields(body, ChatCompletionRequest.model_fields, notes)
    except ValidationError:
        return
    told = {
        path
        for path in paths(body)
        if any(f"{path}.".startswith((f"{one}.", f"{one}[")) for one in notes.ignored)
    }
    assert set(paths(body)) - set(paths(kept)) <= told | {
        path for path in paths(body) if path.endswith("prefix")
    }
    assert not set(paths(kept)) & set(notes.ignored)
