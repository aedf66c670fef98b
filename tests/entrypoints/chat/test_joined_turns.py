# SPDX-License-Identifier: Apache-2.0
"""Turns of one role in a row, and texts behind tool results: joined where a template refuses them, and only there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from quire.entrypoints.chat.template import ChatTemplate
from tests.fixtures.folded import folded
from tests.real.fetch import folder

ANYTHING = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.arguments.of }}{% endfor %}{% endfor %}"""
ALTERNATES = """\
{%- set ns = namespace(turns=0) %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.turns = ns.turns + 1 %}
{%- elif m.role not in ('assistant', 'tool') %}{{ raise_exception('no such role') }}
{%- endif %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.arguments.of }}{% endfor %}{% endfor %}"""
NEVER_TWICE = """\
{%- for m in messages %}
{%- if not loop.first and m.role == loop.previtem.role and m.role != 'tool' %}{{ raise_exception('twice') }}{% endif %}
{%- if not loop.first and loop.previtem.role == 'tool' and m.role == 'user' %}{{ raise_exception('no') }}{% endif %}
{{- '<' ~ m.role ~ '>' ~ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.arguments.of }}{% endfor %}{% endfor %}"""
NO_TOOLS = """\
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<' ~ m.role ~ '>' ~ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.arguments.of }}{% endfor %}{% endfor %}"""
SMALL = {"anything": ANYTHING, "alternates": ALTERNATES, "never_twice": NEVER_TWICE, "no_tools": NO_TOOLS}
PUBLISHED = ("mistralai-Ministral-3-14B-Reasoning-2512", "tokenizer-gemma3", "google-gemma-2-2b-it")
ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "r": "tool"}


def conversation(kinds: str) -> list[dict[str, Any]]:
    """Return messages of these kinds, of which each has a text of its own; `c` calls a tool and `r` answers it."""
    messages: list[dict[str, Any]] = []
    call_id = ""
    for index, kind in enumerate(kinds):
        message: dict[str, Any] = {"role": ROLES[kind], "content": f"text{index}."}
        if kind == "c":
            call_id = f"call{index:05}"
            function = {"name": "f", "arguments": {"of": f"arg{index}."}}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        messages.append({**message, "tool_call_id": call_id} if kind == "r" else message)
    return messages


def histories(kinds: str, size: int) -> list[str]:
    """Return the conversations that a user begins, with or without a system message before, answers behind calls."""
    found = ["".join(rest) for n in range(size) for rest in itertools.product(kinds, repeat=n)]
    begun = [first + rest for first in ("u", "su") for rest in found]
    return [text for text in begun if "r" not in text or 0 <= text.find("c") < text.index("r")]


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    arguments = [
        call["function"]["arguments"]["of"] for one in messages for call in one.get("tool_calls", ())
    ]
    return [*(one["content"] for one in messages), *arguments]


@pytest.mark.parametrize("name", SMALL)
def test_template_with_turns_in_a_row_shows_every_text(name: str) -> None:
    template = ChatTemplate(SMALL[name])
    for kinds in histories("uacr", 5):
        messages = conversation(kinds)
        chat = template.compose(messages)
        assert all(chat.text.count(text) == 1 for text in texts_of(messages)), (kinds, chat.text)
        as_sent = template.try_render(messages)
        assert as_sent is None or not chat.adjusted or "s" in kinds, kinds
        assert as_sent is not None or chat.adjusted, kinds


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_template_with_turns_in_a_row_shows_texts(name: str) -> None:
    path = folder() / "templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    template = ChatTemplate(path.read_text(encoding="utf-8"), bos_token="<s>", eos_token="</s>")
    for kinds in histories("uacr", 4):
        messages = conversation(kinds)
        text = template.render(messages)
        assert all(message["content"] in text for message in messages), (kinds, text)


@folded(
    ("kinds", "expected", "told"),
    [
        ("uu", "<user>text0.\n\ntext1.", "messages[]"),
        ("uaau", "<user>text0.<assistant>text1.\n\ntext2.<user>text3.", "messages[]"),
        (
            "uacra",
            "<user>text0.<assistant>text1.\n\ntext2.<call>arg2.<tool>text3.<assistant>text4.",
            "messages[]",
        ),
        ("ucru", "<user>text0.<assistant>text1.<call>arg1.<tool>text2.\n\ntext3.", "messages[].content"),
        ("ucur", "<user>text0.<assistant>text1.<call>arg1.<tool>text2.\n\ntext3.", "messages[].content"),
        ("ucu", "<user>text0.<assistant>text1.<call>arg1.<tool>text2.", "messages[].content"),
    ],
)
def test_refused_turns_are_joined_and_reported(kinds: str, expected: str, told: str) -> None:
    chat = ChatTemplate(ALTERNATES).compose(conversation(kinds))
    assert chat.text == expected
    assert list(chat.adjusted) == [told]


def test_result_for_a_template_without_tools_is_reported() -> None:
    chat = ChatTemplate(NO_TOOLS).compose(conversation("ucrru"))
    assert chat.text == "<user>text0.<assistant>text1.<call>arg1.<user>text2.\n\ntext3.\n\ntext4."
    assert chat.adjusted == {"messages[].tool_call_id": "result as text of the user"}


def test_joined_assistant_turns_keep_all_calls_and_thoughts() -> None:
    thinking = "{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role %}"
    thinking += "{{ raise_exception('twice') }}{% endif %}{{ m.reasoning or '' }}|{{ m.content }}|"
    thinking += "{{ m.tool_calls | map(attribute='id') | join(',') if m.tool_calls }};{% endfor %}"
    messages = conversation("ucc")
    messages[1]["reasoning"], messages[2]["reasoning"] = "one", "two"
    text = ChatTemplate(thinking).render(messages)
    assert text == "|text0.|;one\n\ntwo|text1.\n\ntext2.|call00001,call00002;"


def test_continued_message_behind_a_call_loses_no_call() -> None:
    messages = conversation("uca")
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = ChatTemplate(ANYTHING).render(messages, **options)
    assert text == "<user>text0.<assistant>text1.<call>arg1.<assistant>text2."


def test_continued_turn_in_a_row_ends_in_its_text() -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = ChatTemplate(ALTERNATES).render(conversation("uaa"), **options)
    assert text == "<user>text0.<assistant>text1.\n\ntext2."
