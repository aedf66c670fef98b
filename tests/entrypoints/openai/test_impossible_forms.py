# SPDX-License-Identifier: Apache-2.0
"""Forms that no text has: a 400 on every API that names the client's field and the place in what it sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for
from tests.entrypoints.openai.test_reasoning import THINKING
from tests.fixtures.folded import folded

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
COMPLETIONS, GENERATE = "/v1/completions", "/api/generate"
SHORT = {"type": "string", "minLength": 5, "maxLength": 2}
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    (SHORT, "/"),
    ({"type": "object", "properties": {"a": SHORT}, "required": ["a"]}, "/"),
    (
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"$ref": "#/$defs/s"}, SHORT]}},
            "$defs": {"s": SHORT},
        },
        "/properties/a/anyOf/0",
    ),
    ({"enum": []}, "/enum"),
    ({"type": "string", "const": 5}, "/"),
    ({"type": "string", "enum": [1, 2]}, "/"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "/"),
    ({"allOf": [{"const": 1}, {"const": 2}]}, "/"),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "/"),
    ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3}, "/"),
    ({"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 10}, "/"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "/"),
    ({"type": "array", "items": False, "minItems": 1}, "/"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "/"),
    ({"type": "string", "pattern": "^a{5}$", "maxLength": 3}, "/"),
    ({"anyOf": [False, False]}, "/"),
    ({"$ref": "#"}, "/"),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, "/"),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "/"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "/"),
    ({"properties": {"a": {"not": {}}}}, "/properties/a/not"),
]
USER = [{"role": "user", "content": "hi"}]


def asked(path: str, schema: Any) -> list[tuple[dict[str, Any], str]]:
    """Requests of an API for a text of this schema, and the field that has it."""
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    more: list[tuple[dict[str, Any], str]] = [
        ({"response_format": named}, "response_format"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ({"guided_json": schema}, "guided_json"),
    ]
    if path == RESPONSES:
        form = {"type": "json_schema", "name": "x", "schema": schema}
        return [({"input": "hi", "text": {"format": form}}, "text.format")]
    if path == MESSAGES:
        form = {"type": "json_schema", "schema": schema}
        fields = {"model": "fake-model", "messages": USER, "max_tokens": 9}
        return [({**fields, "output_config": {"format": form}}, "output_config")]
    if path in (OLLAMA, GENERATE):
        turn = {"messages": USER} if path == OLLAMA else {"prompt": "hi"}
        return [({"model": "fake-model", "stream": False, **turn, "format": schema}, "format")]
    turn = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    return [({**turn, **fields}, name) for fields, name in more]


@pytest.fixture(params=["reasons", "does not"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    parser = "auto" if request.param == "reasons" else "none"
    async with client_for(FakeEngine(FakeTokenizer(THINKING)), reasoning_parser=parser) as client:
        yield client


def error_of(answer: dict[str, Any]) -> tuple[str, str]:
    error = answer["error"]
    return (error, "") if isinstance(error, str) else (error["message"], error.get("param") or "")


@folded("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA, GENERATE])
async def test_schema_that_nothing_fits_is_refused_at_its_place(client: httpx.AsyncClient, path: str) -> None:
    for schema, place in IMPOSSIBLE:
        for body, field in asked(path, schema):
            response = await client.post(path, json=body)
            assert response.status_code == 400, (body, response.text)
            message, param = error_of(response.json())
            assert param in ("", field)
            assert message.startswith(f"{field} at {place}: "), (message, schema)
            assert "json-schema:" not in message


@folded(
    ("value", "field"),
    [
        ({"regex": "[^\\s\\S]"}, "structured_outputs.regex"),
        ({"regex": "("}, "structured_outputs.regex"),
        ({"grammar": "root ::= root \"a\""}, "structured_outputs.grammar"),
        ({"grammar": "start: x"}, "structured_outputs.grammar"),
        ({"json": False}, "structured_outputs.json"),
        ({"structural_tag": {"type": "tag", "begin": "<", "content": {"type": "x"}, "end": ">"}}, "/content"),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SHORT}}},
            "structured_outputs.structural_tag",
        ),
    ],
    ids=str,
)  # fmt: skip
async def test_form_that_nothing_has_is_refused_by_its_field(
    client: httpx.AsyncClient, value: dict[str, Any], field: str
) -> None:
    body = {"messages": USER, "structured_outputs": value}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    message, param = error_of(response.json())
    assert field in message
    assert "/elements" not in message
    assert param == f"structured_outputs.{next(iter(value))}"
