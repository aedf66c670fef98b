# SPDX-License-Identifier: Apache-2.0
"""`StructuredOutputsParams`: exactly one constraint, checked, frozen, and the same on both ends of a wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.errors import ValidationError
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from tests.fixtures.folded import folded

GOOD: list[dict[str, Any]] = [
    {"json": {"type": "object"}},
    {"json": '{"type": "object"}'},
    {"json": True},
    {"regex": "a+"},
    {"regex": ""},
    {"choice": ["a", "b"]},
    {"grammar": 'start: "a"'},
    {"json_object": True},
    {"structural_tag": {"type": "any_text"}},
    {"json": {}, "disable_any_whitespace": True, "disable_additional_properties": True},
    {"json": {}, "whitespace_pattern": " ?"},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "structured_outputs"),
    ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
    ({"json": 1}, "structured_outputs.json"),
    ({"json": ""}, "structured_outputs.json"),
    ({"json": {"a": float("nan")}}, "structured_outputs.json"),
    ({"json": {"a": {1, 2}}}, "structured_outputs.json"),
    ({"regex": 1}, "structured_outputs.regex"),
    ({"regex": "a\0"}, "structured_outputs.regex"),
    ({"choice": []}, "structured_outputs.choice"),
    ({"choice": "abc"}, "structured_outputs.choice"),
    ({"choice": ["a", ""]}, "structured_outputs.choice"),
    ({"choice": ["a", 1]}, "structured_outputs.choice"),
    ({"grammar": ""}, "structured_outputs.grammar"),
    ({"json_object": False}, "structured_outputs.json_object"),
    ({"structural_tag": []}, "structured_outputs.structural_tag"),
    ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
    ({"json": {}, "whitespace_pattern": 1}, "structured_outputs.whitespace_pattern"),
]


@folded("fields", GOOD, ids=str)
def test_parameters_survive_the_wire(fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert found == params
    assert found.structured_outputs is not None
    assert params.structured_outputs is not None
    assert found.structured_outputs.key == params.structured_outputs.key


@folded(("fields", "param"), BAD, ids=str)
def test_invalid_constraint_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as error:
        StructuredOutputsParams(**fields)
    assert error.value.param == param
    assert error.value.message.startswith(param)


def test_a_program_may_give_the_fields_alone() -> None:
    given: Any = {"regex": "a", "choice": None}
    assert SamplingParams(structured_outputs=given).structured_outputs == StructuredOutputsParams(regex="a")
    for bad in ("a", {"regexp": "a"}, ["a"]):
        with pytest.raises(ValidationError, match="structured_outputs"):
            SamplingParams(structured_outputs=bad)  # type: ignore[arg-type]


def test_parameters_do_not_alias_their_source() -> None:
    schema: dict[str, Any] = {"b": 1, "a": 2}
    params = StructuredOutputsParams(json=schema)
    schema["c"] = 3
    assert params.json == '{"b":1,"a":2}'
    with pytest.raises(AttributeError):
        params.regex = "a"  # type: ignore[misc]
