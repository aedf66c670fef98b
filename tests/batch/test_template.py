# SPDX-License-Identifier: Apache-2.0
"""Prompts of rows: what braces mean, and how values that are no text are shown."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pytest

from quire.batch.template import PromptTemplate
from quire.errors import ConfigError, ValidationError
from tests.fixtures.folded import folded

CELLS = {"a": "A{b}", "two words": "W", "{b}": "B", 'q"': "Q", "}": "C"}


@folded(
    ("text", "prompt"),
    [
        ("", ""),
        ("no column", "no column"),
        ("{a}", "A{b}"),
        ("<{a}{two words}>", "<A{b}W>"),
        ('{"{b}"}{"q\\""}{"}"}{"a"}', "BQCA{b}"),
        ('{{"x": "{a}"}}', '{"x": "A{b}"}'),
        ("{{{a}}}", "{A{b}}"),
        ("{{}}{{{{", "{}{{"),
        ("☃ {a}\n", "☃ A{b}\n"),
    ],
)
def test_template_inserts_values(text: str, prompt: str) -> None:
    assert PromptTemplate(text, "--prompt").render(CELLS) == prompt


@folded("text", ["{", "}", "{}", "a {b", "{a}}", "{a{b}}", '{"a}', '{"x": 1}', '{"\\x"}'])
def test_braces_that_name_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--prompt: the"):
        PromptTemplate(text, "--prompt")


@folded(
    ("value", "shown"),
    [
        (None, ""),
        (1, "1"),
        (2**70, str(2**70)),
        (1.5, "1.5"),
        (True, "true"),
        (["ü", 1], '["ü", 1]'),
        ({"a": None}, '{"a": null}'),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        ([datetime.date(2020, 1, 2)], '["2020-01-02"]'),
        (decimal.Decimal("1.50"), "1.50"),
    ],
)
def test_values_are_shown_as_json(value: Any, shown: str) -> None:
    assert PromptTemplate("{a}", "--prompt").render({"a": value}) == shown


@pytest.mark.parametrize("value", [b"bytes", [b"bytes"], {1: object()}])
def test_values_that_are_no_text_are_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="column 'a' holds"):
        PromptTemplate("{a}", "--prompt").render({"a": value})


def test_template_columns_are_the_named_ones() -> None:
    template = PromptTemplate('{b} {a} {"b"} {{c}}', "--system")
    assert template.columns == ("b", "a")
    template.check(["a", "b"])
    with pytest.raises(ConfigError, match="--system: there is no column 'a'; there are: 'b', 'c'"):
        template.check(["b", "c"])
    with pytest.raises(ValidationError, match="no column 'b'; there are: none"):
        template.render({})
