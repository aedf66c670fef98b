# SPDX-License-Identifier: Apache-2.0
"""Ids of calls in a prompt: of the form that the template takes, alike for a call and its result, and no two alike."""

from __future__ import annotations

import random
import re
from typing import Any

from quire.entrypoints.chat.call_arguments import new_call_id
from quire.entrypoints.chat.template import ChatTemplate
from tests.fixtures.folded import folded

MISTRAL = """\
{%- for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}
{%- if c.id|length != 9 %}{{ raise_exception('a call id must have 9 letters or digits, got ' ~ c.id) }}{% endif %}
{{- '[TOOL_CALLS]' ~ c.function.name ~ '(' ~ c.id ~ ')' }}{% endfor %}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id|length != 9 %}{{ raise_exception('a result id must have 9 characters') }}{% endif %}
{{- '[R]' ~ m.content ~ '(' ~ m.tool_call_id ~ ')' }}{% endif %}{% endfor %}"""
CHECKS = MISTRAL.replace("[TOOL_CALLS]", "[C]")  # a template of another family with the same check
PRINTS = CHECKS.replace("|length != 9", " == 'never'")
KIMI = PRINTS.replace("[C]", "<|tool_call_argument_begin|>")
IDS = (
    None, "", "a", "aB3dE6gH9", "call_0", "call_0123456789abcdef01234567", "toolu_01A09q90qw90lq917835lq9",
    "functions.f:0", "chatcmpl-tool-343c5c6c294d3ce1", "a-b-c-d-e", "ünïcödé!!", "\ud800",
)  # fmt: skip
PAIRS = re.compile(r"\[(?:TOOL_CALLS|C)\](\w+)\((.*?)\)|\[R\](\w+)\((.*?)\)", re.DOTALL)


def history(ids: list[str | None]) -> list[dict[str, Any]]:
    """Two turns of calls and their results; each result says the name of its call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for turn in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
        names = [f"f{len(messages)}_{number}" for number in range(len(turn))]
        calls = [
            {"function": {"name": name, "arguments": {}}, **({} if one is None else {"id": one})}
            for name, one in zip(names, turn, strict=True)
        ]
        messages.append({"role": "assistant", "tool_calls": calls})
        for name, one in zip(names, turn, strict=True):
            result = {"role": "tool", "content": name}
            messages.append(result if one is None else {**result, "tool_call_id": one})
    return messages


@folded("template", [MISTRAL, CHECKS], ids=["mistral", "checks"])
@folded("seed", range(20))
def test_ids_of_any_form_are_nine_letters_or_digits(template: str, seed: int) -> None:
    rng = random.Random(seed)
    distinct = [one for one in rng.sample(IDS, 6) if one is not None]
    ids = [*distinct, *([None] * rng.randrange(3))]
    rng.shuffle(ids)
    text = ChatTemplate(template).render(history(ids))
    assert text == ChatTemplate(template).render(history(ids))
    calls, results = {}, {}
    for called, call_id, answered, result_id in PAIRS.findall(text):
        (calls if called else results)[called or answered] = call_id or result_id
    assert calls == results
    assert len(set(calls.values())) == len(ids) == len(calls)
    if template == MISTRAL or not all(one is not None and len(one) == 9 for one in ids):
        assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in calls.values())
    assert "aB3dE6gH9" not in ids or "aB3dE6gH9" in calls.values()


def test_template_that_takes_any_id_gets_the_clients() -> None:
    text = ChatTemplate(PRINTS).render(history(["call_0123", "x"]))
    assert text == "[C]f1_0(call_0123)[R]f1_0(call_0123)[C]f3_0(x)[R]f3_0(x)"


def test_ids_of_kimi_are_the_name_and_a_number() -> None:
    text = ChatTemplate(KIMI).render(history(["call_1", None, "functions.f4_0:2", "call_2"]))
    assert re.findall(r"\[R\]\w+\((.*?)\)", text) == [
        "functions.f1_0:0", "functions.f1_1:1", "functions.f4_0:2", "functions.f4_1:3",
    ]  # fmt: skip


def test_same_id_in_two_turns_belongs_to_the_result_behind_it() -> None:
    text = ChatTemplate(MISTRAL).render(history(["call_0", "call_0"]))
    found = [call or result for _, call, _, result in PAIRS.findall(text)]
    assert len(found) == 4
    assert len(set(found)) == 1


def test_result_of_no_call_has_an_id_of_its_own() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "tool", "content": "lone", "tool_call_id": "call_9"},
    ]
    chat = ChatTemplate(MISTRAL).compose(messages)
    assert re.fullmatch(r"\[R\]lone\([A-Za-z0-9]{9}\)", chat.text)
    assert chat.adjusted == {"messages[].tool_call_id": "kept without a call"}


def test_results_without_ids_belong_to_the_calls_of_their_names() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "name": "g", "content": "g"},
        {"role": "tool", "name": "f", "content": "f"},
    ]
    found = PAIRS.findall(ChatTemplate(MISTRAL).render(messages))
    ids = {name or result: call or answered for name, call, result, answered in found}
    assert len({call or answered for _, call, _, answered in found}) == len(ids) == 2


def test_new_ids_are_taken_as_they_are() -> None:
    ids = [new_call_id() for _ in range(4)]
    text = ChatTemplate(MISTRAL).render(history(list(ids)))
    assert [call for _, call, _, _ in PAIRS.findall(text) if call] == ids


def test_template_that_joins_arguments_to_text_gets_them_as_text() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ 'f' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"a": "ü"}'}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    assert template.render(messages) == 'f{"a": "ü"}'
