# SPDX-License-Identifier: Apache-2.0
"""Tests of templates' thinking options, and of where a constraint begins with each."""

from __future__ import annotations

from typing import Any

from quire.entrypoints.chat.formats.reasoning import FORMATS
from quire.entrypoints.chat.formats.selection import AnswerFormat
from quire.entrypoints.chat.template import ChatTemplate
from quire.entrypoints.chat.thinking_switch import ThinkingSwitch
from tests.fixtures.folded import folded

THINK = next(row for row in FORMATS if row.name == "qwen3")
BEGIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
THINKS_BY_DEFAULT = BEGIN + "{% if enable_thinking %}<think>\n{% endif %}"
OFF_CLOSES = (
    BEGIN + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
ALWAYS_OPEN = BEGIN + "<think>\n"
NO_SWITCH = BEGIN + "{# <think> #}"
IN_WORDS = "{% if thinking %}Think between <think> and </think>.{% endif %}" + BEGIN
EFFORT = "Effort: {{ reasoning_effort | default('medium') }}." + BEGIN
MODE = (
    "{% if thinking_mode is defined %}{% if thinking_mode == 'enabled' %}Think.{% elif thinking_mode == 'disabled' %}"
    "Do not.{% endif %}{% else %}Think if you like.{% endif %}" + BEGIN
)
OPTION = "{% if thinking_option not in ['on', 'off'] %}{{ raise_exception('on or off') }}{% endif %}" + BEGIN
HYBRID = (
    BEGIN + "{% if enable_thinking is defined %}{% if enable_thinking is true %}<think>\n"
    "{% elif enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
BUDGET = "{% if thinking_budget == 0 %}Do not think.{% endif %}" + BEGIN


@folded(
    ("template", "options", "is_off"),
    [
        (THINKS_BY_DEFAULT, {}, True),
        (THINKS_BY_DEFAULT, {"enable_thinking": False}, True),
        (THINKS_BY_DEFAULT, {"enable_thinking": True}, False),
        (OFF_CLOSES, {}, False),
        (OFF_CLOSES, {"enable_thinking": True}, False),
        (OFF_CLOSES, {"enable_thinking": False}, True),
        (ALWAYS_OPEN, {}, False),
        (NO_SWITCH, {}, False),
        (NO_SWITCH, {"enable_thinking": False}, False),
        (IN_WORDS, {}, True),
        (IN_WORDS, {"thinking": True}, False),
        (IN_WORDS, {"thinking": False}, True),
        (EFFORT, {}, False),
        (EFFORT, {"reasoning_effort": "low"}, False),
        (EFFORT, {"reasoning_effort": "none"}, True),
        (MODE, {}, False),
        (MODE, {"thinking_mode": "enabled"}, False),
        (MODE, {"thinking_mode": "disabled"}, True),
        (OPTION, {}, False),
        (OPTION, {"thinking_option": "off"}, True),
        (HYBRID, {}, True),
        (HYBRID, {"enable_thinking": True}, False),
        (BUDGET, {}, False),
        (BUDGET, {"thinking_budget": 0}, True),
        (BUDGET, {"thinking_budget": 512}, False),
    ],
)
def test_switch_follows_the_template(template: str, options: dict[str, Any], is_off: bool) -> None:
    switch = ThinkingSwitch(ChatTemplate(template), THINK)
    assert switch.is_off(options) is is_off
    assert switch.is_off(options) is is_off  # as remembered


def test_switch_without_reasoning_format_is_on() -> None:
    assert not ThinkingSwitch(ChatTemplate(THINKS_BY_DEFAULT), None).is_off({"enable_thinking": False})


def test_switch_remembers_a_bounded_number_of_options() -> None:
    switch = ThinkingSwitch(ChatTemplate(EFFORT), THINK)
    for number in range(500):
        assert not switch.is_off({"reasoning_effort": f"level {number}"})
    assert len(switch._known) <= 64


@folded(
    "row", [row for row in FORMATS if row.opens and row.name != "openai_gptoss"], ids=lambda row: row.name
)
def test_constraint_starts_at_once_if_thinking_is_off(row: Any) -> None:
    wanted = {"type": "const_string", "value": "yes"}
    answers = AnswerFormat(None, row)
    assert answers.grammar("<assistant>", may_think=False).text(wanted) is wanted
    found = answers.reader("<assistant>", None, may_think=False).feed("yes")
    assert found in (["yes"], [])  # held back where it may begin a marker
    assert answers.grammar(f"<assistant>{row.opens[0]}", may_think=False).text(wanted) != wanted


def test_harmony_constraint_starts_with_the_final_message() -> None:
    row = next(row for row in FORMATS if row.name == "openai_gptoss")
    wanted = {"type": "const_string", "value": "yes"}
    form = AnswerFormat(None, row).grammar("<|start|>assistant", may_think=False).text(wanted)
    assert form["elements"][0] == {"type": "const_string", "value": "<|channel|>final<|message|>"}
