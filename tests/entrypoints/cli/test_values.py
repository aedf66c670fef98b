# SPDX-License-Identifier: Apache-2.0
"""Values that flags take."""

from __future__ import annotations

import math

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.cli.options import HumanInt, JsonObjectType, Rate
from tests.fixtures.folded import folded


@folded(
    ("text", "number"),
    [
        ("0", 0),
        ("-1", -1),
        ("+7", 7),
        ("1k", 1000),
        ("1K", 1024),
        ("2.5m", 2_500_000),
        ("1.5K", 1536),
        ("4G", 4 * 2**30),
        ("1t", 10**12),
        ("0.3k", 300),
        (12, 12),
    ],
)
def test_integers_with_units(text: object, number: int) -> None:
    assert HumanInt().convert(text, None, None) == number


@settings(derandomize=True)
@given(st.integers())
def test_every_plain_integer_is_itself(number: int) -> None:
    assert HumanInt().convert(str(number), None, None) == number


@folded("text", ["", "k", "1kk", "1.5", "0.0001k", "1e3", "0x10", "nan", "1 k", True, None])
def test_invalid_integer_is_a_bad_parameter(text: object) -> None:
    with pytest.raises(click.BadParameter):
        HumanInt().convert(text, None, None)


def test_minimum() -> None:
    assert HumanInt(minimum=1).convert("1", None, None) == 1
    with pytest.raises(click.BadParameter, match="'0' is less than 1"):
        HumanInt(minimum=1).convert("0", None, None)


def test_json_objects() -> None:
    assert JsonObjectType().convert('{"a": [1, null]}', None, None) == {"a": [1, None]}
    assert JsonObjectType().convert({"a": 1}, None, None) == {"a": 1}
    for text in ("", "{", "[1]", "3", 3):
        with pytest.raises(click.BadParameter, match=r"not (JSON|a JSON object)"):
            JsonObjectType().convert(text, None, None)


def test_rates() -> None:
    assert Rate().convert("2.5", None, None) == 2.5
    assert math.isinf(Rate().convert("inf", None, None))
    for text in ("0", "-1", "nan", "fast"):
        with pytest.raises(click.BadParameter):
            Rate().convert(text, None, None)
