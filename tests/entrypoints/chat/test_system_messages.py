# SPDX-License-Identifier: Apache-2.0
"""System messages anywhere in a conversation: no template loses one, and one that takes it gets it in its place."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from quire.entrypoints.chat.template import ChatTemplate
from quire.errors import ValidationError
from tests.fixtures.folded import folded

IN_PLACE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_ONLY = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}
{{- '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}"""
LOSES = """\
{%- for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""
ALTERNATES = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<' ~ m.role ~ '>' ~ (system if loop.first else '') ~ m.content }}{% endfor %}"""
NONE_AT_ALL = """\
{%- for m in messages %}
{%- if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}
{{- '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}"""
DROPS_ALL = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATES = {
    "in_place": IN_PLACE, "first_only": FIRST_ONLY, "loses": LOSES, "alternates": ALTERNATES,
    "none_at_all": NONE_AT_ALL, "drops_all": DROPS_ALL,
}  # fmt: skip


def conversation(roles: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"text{index}."} for index, role in enumerate(roles)]


def conversations() -> list[tuple[str, ...]]:
    """Turns of user and assistant, with up to two system messages anywhere among them."""
    found: dict[tuple[str, ...], None] = {}
    for size in (1, 2, 3):
        turns = [("user", "assistant")[index % 2] for index in range(size)]
        for places in itertools.product(range(size + 1), repeat=2):
            roles = list(turns)
            for role, place in zip(("system", "developer"), sorted(places, reverse=True), strict=True):
                roles.insert(place, role)
            found[tuple(roles)] = None
            roles.remove("developer")
            found[tuple(roles)] = None
    return list(found)


@folded("name", TEMPLATES)
def test_template_with_system_messages_anywhere_shows_every_text(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    for roles in conversations():
        messages = conversation(roles)
        chat = template.compose(messages)
        assert all(message["content"] in chat.text for message in messages), (roles, chat.text)
        others = [message["content"] for message in messages if message["role"] in ("user", "assistant")]
        assert [text for text in others if text in chat.text] == sorted(others, key=chat.text.index)
        as_told = "".join(
            f"<{message['role'].replace('developer', 'system')}>{message['content']}" for message in messages
        )
        assert bool(chat.adjusted) == (chat.text != as_told) or name == "alternates"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("in_place", "<user>text0.<system>text1.<user>text2."),
        ("first_only", "<system>text1.<user>text0.<user>text2."),
        ("alternates", "<user>text1.text0.\n\ntext2."),
        ("none_at_all", "<user>text1.\n\ntext0.\n\ntext2."),
        ("drops_all", "<user>text1.\n\ntext0.<user>text2."),
    ],
)
def test_system_message_in_the_middle_goes_to_the_nearest_place(name: str, expected: str) -> None:
    assert ChatTemplate(TEMPLATES[name]).render(conversation(("user", "system", "user"))) == expected


def test_several_system_messages_are_joined_in_their_order() -> None:
    chat = ChatTemplate(FIRST_ONLY).compose(conversation(("system", "developer", "user", "system")))
    assert chat.text == "<system>text0.\n\ntext1.\n\ntext3.<user>text2."
    assert chat.adjusted == {"messages[].role": "system, moved into the first message"}


def test_repeated_text_is_not_mistaken_for_the_system_message() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "system", "content": "hi"}]
    assert ChatTemplate(LOSES).render(messages) == "<system>hi<user>hi"


def test_unknown_role_that_fits_by_chance_is_moved() -> None:
    """A template that alternates counts a system message as a turn of the assistant."""
    messages = conversation(("user", "system"))
    assert ChatTemplate(ALTERNATES).render(messages) == "<user>text1.text0."


def test_refusal_for_another_reason_is_the_templates_own() -> None:
    template = ChatTemplate("{{ raise_exception('never') }}")
    with pytest.raises(ValidationError, match="never"):
        template.render(conversation(("user", "system")))


def test_final_message_that_is_continued_keeps_its_place() -> None:
    messages = conversation(("user", "system", "assistant"))
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(FIRST_ONLY).render(messages, **options).endswith("<assistant>text2.")
