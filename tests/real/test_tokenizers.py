# SPDX-License-Identifier: Apache-2.0
"""Published tokenizers and chat templates, beside transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from quire.engine.tokenizer import Tokenizer
from quire.entrypoints.chat.call_arguments import forms_of, with_call_ids
from quire.entrypoints.chat.messages import MediaTexts
from quire.entrypoints.chat.template import ChatTemplate
from quire.errors import ValidationError
from tests.real.fetch import TOKENIZERS, folder

pytestmark = pytest.mark.real

TEXTS = (
    "Hello, world!",
    "  two  spaces\tand tabs\n\n\n",
    "naïve café — “quotes” … 1234567890",
    "東京は日本の首都です。한국어 ไทย हिन्दी",
    "🐞👩‍👩‍👧‍👦 e\u0301 \u200d\ufeff",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\n<s>[INST] </s> <bos> <|eot_id|>",
    "".join(map(chr, range(1, 128))),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & 'here'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": 'What is <5 & 6> "here" 🐞?'}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
}
CALLED = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "22 degrees"},
]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": ([SYSTEM, USER, {"role": "assistant", "content": "Eleven."}, USER], {}),
    "no-prompt": ([USER, {"role": "assistant", "content": "Eleven."}], {"add_generation_prompt": False}),
    "tools": ([SYSTEM, USER], {"tools": [TOOL]}),
    "called": ([USER, *CALLED], {"tools": [TOOL]}),
    "thinking": ([USER], {"enable_thinking": True}),
    "not-thinking": ([USER], {"enable_thinking": False}),
}
TEMPLATES = sorted(path.name for path in (folder() / "templates").glob("*.jinja"))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_encodes_as_transformers_and_decodes_back(name: str, real: Callable[[str], Path]) -> None:
    from transformers import (
        PreTrainedTokenizerFast,  # AutoTokenizer builds some anew, without what the file says
    )

    directory = real("tokenizers") / name
    ours, theirs = Tokenizer.from_dir(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        for special in (False, True):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected, text
            assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True), text


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_renders_as_transformers_if_that_does(name: str) -> None:
    """Conversations render as in transformers; if the template refuses one, quire may render another form of it."""
    source = (folder() / "templates" / name).read_text(encoding="utf-8")
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", content_format="string")
    for label, (messages, options) in CONVERSATIONS.items():
        read = {"add_generation_prompt", *template.variables}  # what a template does not read, quire refuses
        variables = {name: value for name, value in options.items() if name in read}
        # Ids are those that the model was taught, also where the template takes any.
        expected = as_transformers(source, with_call_ids(messages, forms_of(source)[0]), variables)
        assert expected in (None, rendered(template, messages, variables)), label


IMAGE, WORDS = {"type": "image"}, {"type": "text", "text": "What is it?"}
SEEN: dict[str, list[dict[str, Any]]] = {
    "first": [{"role": "user", "content": [IMAGE, WORDS]}],
    "last": [{"role": "user", "content": [WORDS, IMAGE]}],
    "between": [{"role": "user", "content": [WORDS, IMAGE, WORDS, IMAGE, WORDS]}],
    "alone": [{"role": "user", "content": [IMAGE]}],
    "in turns": [
        {"role": "user", "content": [IMAGE, WORDS]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [WORDS, IMAGE]},
    ],
    "of the system": [{"role": "system", "content": [WORDS, IMAGE]}, USER],
    "of the assistant": [USER, {"role": "assistant", "content": [WORDS, IMAGE]}, USER],
    "of a tool": [USER, CALLED[0], {**CALLED[1], "content": [WORDS, IMAGE]}],
}
MARKERS = ("[IMG]", "<image>", "<|image|>", "<start_of_image>", "<|image_pad|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_shows_each_image_once_or_refuses(name: str) -> None:
    """An image that a template drops is an error; those of four that need tools refuse all."""
    source = (folder() / "templates" / name).read_text(encoding="utf-8")
    marker = next((each for each in MARKERS if each in source), MARKERS[-1])
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", media=MediaTexts(marker, (marker,)))
    for label, messages in SEEN.items():
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        try:
            shown = template.compose(messages).media_kinds()
        except ValidationError:
            continue
        assert len(shown) == sum(content.count(IMAGE) for content in contents), label


def rendered(template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    """Return the prompt, None if the template refuses the conversation."""
    try:
        return template.render(messages, **variables)
    except ValidationError:
        return None


def as_transformers(source: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    """Return transformers' prompt, None if the template refuses the conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", **variables}
    try:
        (prompt,), _ = render_jinja_template([messages], chat_template=source, **options)
    except (TemplateError, TypeError, ValueError):
        return None
    return str(prompt)
