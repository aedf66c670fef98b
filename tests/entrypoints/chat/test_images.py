# SPDX-License-Identifier: Apache-2.0
"""Images in conversations: shown where they stand, counted, and bound to the right placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.tokenizer import Tokenizer
from quire.entrypoints.chat.media import _texts_of
from quire.entrypoints.chat.messages import MediaTexts
from quire.entrypoints.chat.template import ChatTemplate
from quire.errors import ValidationError
from quire.multimodal.door.layout import NUMBER, Expansion, MediaTokens, PlaceholderLayout, PreparedItem

MARKER = "<|image_pad|>"
TEXTS = MediaTexts(MARKER, (MARKER, "<break>"))
TOKENS = MediaTokens(MARKER, MARKER, TEXTS.literals)
PARTS = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{%- if message.content is string %}{{ message.content }}{% else %}"
    "{%- for part in message.content %}{% if part.type == 'image' %}[MARKER]"
    "{%- elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
).replace("MARKER", MARKER)
STRINGS = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
OPENAI_PARTS = PARTS.replace("'image'", "'image_url'")
IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def tokenizer(*, special: bool) -> Tokenizer:
    """Every byte is a token; the marker is a special token, or an added one that is none."""
    pre = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {
        letter: index for index, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre, tokenizers.decoders.ByteLevel()
    roles = ["<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    backend.add_special_tokens(roles)
    media = [tokenizers.AddedToken(name, special=special, normalized=False) for name in TEXTS.literals]
    (backend.add_special_tokens if special else backend.add_tokens)(media)
    return Tokenizer(backend, {})


def template(source: str, tokens: Tokenizer) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=tokens.special_tokens, media=TEXTS)


def item(number: int, *counts: int) -> PreparedItem:
    """An item of rows with breaks between them; its digest says its number."""
    pieces = [piece for count in counts for piece in ((MARKER, count), ("<break>", 1))]
    return PreparedItem(bytes([number]) * 32, "image", f"/{number}", PlaceholderLayout(MARKER, [pieces[:-1]]))


@pytest.fixture(scope="module", params=[True, False], ids=["special", "added"])
def tokens(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer(special=request.param)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PARTS, f"<|user|>a[{MARKER}]b[{MARKER}]<|assistant|>"),
        (OPENAI_PARTS, f"<|user|>a[{MARKER}]b[{MARKER}]<|assistant|>"),
        (STRINGS, f"<|user|>{MARKER}\n{MARKER}\na\nb"),
    ],
)
def test_an_image_is_shown_where_the_template_can(tokens: Tokenizer, source: str, expected: str) -> None:
    messages = [{"role": "user", "content": [text("a"), IMAGE, text("b"), IMAGE]}]
    assert template(source, tokens).render(messages) == expected


def test_texts_without_an_image_between_are_lines(tokens: Tokenizer) -> None:
    content = [text("a"), text("b"), IMAGE, text("c"), text("d")]
    rendered = template(PARTS, tokens).render([{"role": "user", "content": content}])
    assert rendered == f"<|user|>a\nb[{MARKER}]c\nd<|assistant|>"


def test_images_of_all_roles_are_shown(tokens: Tokenizer) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [IMAGE]},
        {"role": "user", "content": [text("look"), IMAGE]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": [IMAGE, text("a screenshot")]},
    ]
    assert template(PARTS, tokens).render(messages).count(MARKER) == 3


def test_an_image_of_a_tool_goes_to_the_user_if_need_be(tokens: Tokenizer) -> None:
    """The template shows none in a tool's message; the result then is the user's."""
    source = PARTS.replace("part.type == 'image'", "part.type == 'image' and message.role == 'user'")
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": [IMAGE]},
    ]
    assert template(source, tokens).render(messages).endswith(f"<|user|>[{MARKER}]<|assistant|>")


def test_images_of_a_tool_may_be_markers_in_its_text(tokens: Tokenizer) -> None:
    """The template prints a tool's content as text, and takes no user behind a call, as Mistral Small 3.2's."""
    tool = (
        "{% if message.role == 'tool' %}[{{ message.content | string }}]{% elif message.content is string %}"
    )
    source = PARTS.replace("{%- if message.content is string %}", tool).replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if loop.previtem and message.role == 'user' %}"
        "{{ raise_exception('no') }}{% endif %}",
    )
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [IMAGE]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": [text("a shot"), IMAGE]},
    ]
    rendered = template(source, tokens).compose(messages)
    assert rendered.text == f"<|user|>[{MARKER}]<|assistant|><|tool|>[{MARKER}\na shot]<|assistant|>"
    assert rendered.adjusted == {"messages[].content": "media of a tool result as markers in its text"}
    assert rendered.media_kinds() == ["image", "image"]


def test_a_template_that_drops_an_image_is_an_error(tokens: Tokenizer) -> None:
    source = PARTS.replace("part.type == 'image'", "part.type == 'image' and loop.index < 2")
    with pytest.raises(ValidationError, match="shows 1 of the 2 images"):
        template(source, tokens).render([{"role": "user", "content": [IMAGE, IMAGE]}])


def test_a_continued_answer_may_have_an_image(tokens: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [IMAGE, text("This is")]}]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    assert template(PARTS, tokens).render(messages, **options) == f"<|user|>x<|assistant|>[{MARKER}]This is"


def test_a_model_of_text_refuses_the_part(tokens: Tokenizer) -> None:
    plain = ChatTemplate(PARTS, special_tokens=tokens.special_tokens)
    with pytest.raises(ValidationError, match="this model takes text only"):
        plain.render([{"role": "user", "content": [IMAGE]}])


SPELLED = st.sampled_from([MARKER, "<break>", "<|user|>", "<|image", "_pad|>", "[", "]", "\n", " "])
WORDS = st.lists(SPELLED | st.text("ab<|>_", max_size=3), max_size=4).map("".join)
CONTENT = st.lists(WORDS.map(text) | st.just(IMAGE), min_size=1, max_size=5)


@given(contents=st.lists(CONTENT, min_size=1, max_size=3), source=st.sampled_from([PARTS, STRINGS]))
@settings(max_examples=200, deadline=None)
def test_spelled_markers_never_shift_images(
    tokens: Tokenizer, contents: list[list[dict[str, Any]]], source: str
) -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": c} for i, c in enumerate(contents)]
    num_images = sum(part == IMAGE for content in contents for part in content)
    items = [item(number, number % 3 + 1, 2) for number in range(num_images)]
    chat = template(source, tokens).compose(messages)
    ids = chat.with_media([MARKER] * num_images).encode(tokens)
    expanded, media = Expansion(TOKENS, tokens.id_of, items).expand(ids)
    assert [one.digest for one in media] == [one.digest for one in items]
    marker, line = tokens.id_of(MARKER), tokens.id_of("<break>")
    for number, one in enumerate(media):
        first = number % 3 + 1
        assert expanded[one.start : one.end] == [marker] * first + [line] + [marker] * 2
        assert one.runs == [(one.start, one.start + first), (one.start + first + 1, one.end)]
    outside = [token for i, token in enumerate(expanded) if not any(m.start <= i < m.end for m in media)]
    assert marker not in outside
    assert line not in outside
    assert tokens.decode(expanded, skip_special_tokens=False) == shown(chat.text, contents, source, items)


def shown(rendered: str, contents: Sequence[Any], source: str, items: list[PreparedItem]) -> str:
    """The prompt with the markers of images, not those of users, in full."""
    if not items:
        return rendered
    spelled: list[str] = []
    for content in contents:
        pieces = ["\0" if part == IMAGE else part["text"].replace(MARKER, "\1") for part in content]
        spelled.append("\n".join(pieces).replace("\n\0", "\0").replace("\0\n", "\0"))
    whole = ""
    for index, content in enumerate(spelled):
        role = "<|user|>" if index % 2 == 0 else "<|assistant|>"
        if source == STRINGS and "\0" in content:
            texts = "\n".join(filter(None, content.split("\0")))
            content = "\n".join(["\0"] * content.count("\0") + [texts])
        whole += role + (content.replace("\0", "[\0]") if source == PARTS else content)
    whole += "<|assistant|>" if source == PARTS else ""
    for one in items:
        run = "".join(name * count for name, count in one.layout.runs[0])
        whole = whole.replace("\0", run, 1)
    return whole.replace("\1", MARKER)


def test_another_number_of_placeholders_is_an_error(tokens: Tokenizer) -> None:
    expansion = Expansion(TOKENS, tokens.id_of, [item(0, 1)])
    for count in (0, 2):
        with pytest.raises(ValidationError, match=f"has {count} placeholders .* need 1"):
            expansion.expand([tokens.id_of(MARKER) or 0] * count)
    with pytest.raises(ValidationError, match="has no token '<absent>'"):
        Expansion(
            TOKENS,
            tokens.id_of,
            [PreparedItem(b"", "image", "", PlaceholderLayout(MARKER, [[("<absent>", 1)]]))],
        )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (f"{MARKER}what", f"{MARKER * 2}<|user|>what<|tool|>"),
        (f"<|user|>{MARKER}what", f"{MARKER * 2}<|user|>what<|tool|>"),
        (f"{MARKER}<|user|>what<|tool|>", f"{MARKER * 2}<|user|>what<|tool|>"),
        (f"{MARKER}a{MARKER}", f"{MARKER * 2}a{MARKER * 3}<|user|><|tool|>"),
        (f"a<|user|>{MARKER}", f"a<|user|>{MARKER * 2}<|user|><|tool|>"),
    ],
)
def test_a_prefix_has_its_tokens_once(tokens: Tokenizer, prompt: str, expected: str) -> None:
    kind = replace(TOKENS, prefix_form=("<|user|>", "<|tool|>"))
    items = [item(number, number + 2) for number in range(prompt.count(MARKER))]
    ids, media = Expansion(kind, tokens.id_of, items).expand(tokens.encode(prompt, add_special_tokens=False))
    assert tokens.decode(ids, skip_special_tokens=False) == expected
    prefix = media[0].prefix
    assert prefix is not None
    assert prefix.length == len(ids)
    assert all(ids[at] == tokens.id_of(MARKER) for one in media for at in range(one.start, one.end))
    longer = tokens.encode(f"{prompt}?", add_special_tokens=False)
    _, (other, *_) = Expansion(kind, tokens.id_of, items).expand(longer)
    assert other.prefix is not None
    assert other.prefix.digest != prefix.digest
    assert Expansion(kind, tokens.id_of, []).expand([1, 2]) == ([1, 2], [])


def test_several_runs_of_an_item_are_one_item(tokens: Tokenizer) -> None:
    layout = PlaceholderLayout(
        f"({MARKER},{MARKER})", [[(MARKER, 2)], [(MARKER, 3)]], grid=(1, 1, 5), both_ways=True
    )
    ids = tokens.encode(f"x{layout.text}y", add_special_tokens=False)
    expanded, (one,) = Expansion(TOKENS, tokens.id_of, [PreparedItem(b"", "image", "", layout)]).expand(ids)
    assert (one.start, one.end, one.runs) == (2, 8, [(2, 4), (5, 8)])
    assert (one.grid, one.both_ways, one.num_embeddings) == ((1, 1, 5), True, 5)
    assert tokens.decode(expanded, skip_special_tokens=False) == f"x({MARKER * 2},{MARKER * 3})y"


def test_numbered_placeholders_count_by_kind() -> None:
    layout = PlaceholderLayout(f"<{NUMBER}>", [])
    items = [PreparedItem(b"", kind, "", layout) for kind in ("image", "video", "image")]
    assert _texts_of(items) == ["<0>", "<0>", "<1>"]
