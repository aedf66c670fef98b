# SPDX-License-Identifier: Apache-2.0
"""Every field that asks for a form, in every spelling, becomes the constraint that it means."""

from __future__ import annotations

from typing import Any

import pytest

from quire.entrypoints.openai.protocol.constraints import constraint_of
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest
from quire.errors import ValidationError
from quire.sampling_params import StructuredOutputsParams
from tests.fixtures.folded import folded

SCHEMA: dict[str, Any] = {"type": "integer"}
TAG: dict[str, Any] = {"type": "structural_tag", "format": {"type": "any_text"}}
SAME: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"grammar": ""}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": False, "schema": SCHEMA}}},
     {"json": SCHEMA}),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "regex", "pattern": "a"}}, {"regex": "a"}),
    ({"response_format": {"type": "grammar", "grammar": "start: x"}}, {"grammar": "start: x"}),
    ({"response_format": TAG}, {"structural_tag": TAG}),
    ({"structured_outputs": {"choice": ["a"], "regex": None}}, {"choice": ["a"]}),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
     {"json": SCHEMA, "disable_any_whitespace": True}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": '{"type":"integer"}'}, {"json": SCHEMA}),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
    ({"guided_regex": "a"}, {"regex": "a"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": "start: x"}, {"grammar": "start: x"}),
    ({"json_schema": SCHEMA}, {"json": SCHEMA}),
    ({"regex": "a"}, {"regex": "a"}),
    ({"ebnf": "root ::= x"}, {"grammar": "root ::= x"}),
    ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
]  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"response_format": {}},
    {"response_format": {"type": ["text"]}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": []}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
    {"response_format": {"type": "regex", "pattern": 1}},
    {"response_format": {"type": "json_object"}, "guided_json": SCHEMA},
    {"structured_outputs": {"json": SCHEMA}, "regex": "a"},
]


def request(fields: dict[str, Any]) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


@folded(("fields", "expected"), SAME, ids=lambda value: str(value)[:60])
def test_a_field_means_its_constraint(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert constraint_of(request(fields)) == wanted


@folded("fields", BAD, ids=str)
def test_malformed_constraint_is_refused_by_its_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        constraint_of(request(fields))
    assert error.value.param in fields
