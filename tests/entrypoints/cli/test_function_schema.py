# SPDX-License-Identifier: Apache-2.0
"""Tests of the tool schema made from a Python function."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest

from quire.entrypoints.cli.run import tool_of
from quire.errors import ConfigError
from tests.fixtures.folded import folded


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


def forecast(
    city: str,
    days: int = 1,
    *,
    unit: Unit = Unit.C,
    tags: list[str] | None = None,
    exact: Annotated[bool, "Whether to round."] = False,
) -> str:
    """Tell the weather.

    Of the days to come.

    Args:
        city: where,
            in any language
        days (int): how many
        tags: what for

    Returns:
        city: a text
    """
    return f"{city} {days} {unit} {tags} {exact}"


def test_schema_and_words_come_from_signature_and_docstring() -> None:
    assert tool_of(forecast) == {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "Tell the weather.\n\nOf the days to come.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where, in any language"},
                    "days": {"type": "integer", "description": "how many"},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "description": "what for",
                    },
                    "exact": {"type": "boolean", "description": "Whether to round."},
                },
                "required": ["city"],
            },
        },
    }


@folded(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (float, {"type": "number"}),
        (None, {"type": "null"}),
        (Any, {}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (dict, {"type": "object"}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["a", 2], {"enum": ["a", 2]}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
    ],
    ids=str,
)
def test_types(hint: Any, schema: dict[str, Any]) -> None:
    def function(x: Any) -> None: ...

    function.__annotations__["x"] = hint
    assert tool_of(function)["function"]["parameters"]["properties"] == {"x": schema}


def test_bare_function_schema_has_no_invented_parts() -> None:
    def bare(x, **more):  # type: ignore[no-untyped-def]
        pass

    assert tool_of(bare)["function"] == {
        "name": "bare",
        "parameters": {"type": "object", "properties": {"x": {}}, "required": ["x"]},
    }


def by_position(x: int, /) -> None: ...


def many(*x: int) -> None: ...


def unknown(x: complex) -> None: ...


def missing(x: NotThere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("function", [by_position, many, unknown, missing], ids=lambda f: f.__name__)
def test_function_with_unusable_parameters_is_refused_by_name(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=rf"--tool {function.__name__}: .*"):
        tool_of(function)
