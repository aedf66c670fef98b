# SPDX-License-Identifier: Apache-2.0
"""Chat templates: what they can use, what they cannot, and how they fail."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.entrypoints.chat import template as template_module
from quire.entrypoints.chat.template import ChatTemplate
from quire.errors import ConfigError, ValidationError
from tests.fixtures.folded import folded

HI = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(source: str, messages: Any = HI, **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **options)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "readers"),
    [
        (CHATML, set()),
        (CHATML.replace("m.role", "m.role + (m.name or '')"), {"system", "user", "assistant", "tool"}),
        (CHATML.replace("m.role", "m.role + (m.name or '' if m.role == 'tool' else '')"), {"tool"}),
        ("{{ messages | tojson }}", {"system", "user", "assistant", "tool"}),
        (
            "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}",
            {"system", "assistant", "tool"},
        ),
    ],
)
def test_template_reads_names_of_exactly_these_roles(source: str, readers: set[str]) -> None:
    template = ChatTemplate(source)
    assert {role for role in ("system", "user", "assistant", "tool") if template.reads_name(role)} == readers
    assert template.reads_name("developer") == template.reads_name("system")


@folded(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{% generation %}x{{ 1 }}{% endgeneration %}y", "x1y"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{{ missing is defined }}", "False"),
    ],
)
def test_template_functions_and_filters_render(source: str, expected: str) -> None:
    assert render(source + "{# #}") == expected


@pytest.mark.item(16)
@folded(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10**9) | list }}",
        "{{ 1 / 0 }}",
        "{{ undefined_thing.x }}",
        "{{ 'a' + 1 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'x' %}",
    ],
)
def test_forbidden_template_code_is_refused(source: str) -> None:
    with pytest.raises(ValidationError, match="chat template") as refused:
        render(source)
    assert "0x" not in refused.value.message


def test_hidden_attributes_are_undefined() -> None:
    assert render("{{ ''.__class__ }}{{ messages._x }}") == ""


def test_raise_exception() -> None:
    loud = "{{ raise_exception('no ' ~ messages[0].content) }}"
    with pytest.raises(ValidationError, match="refused the messages: no <|im_end|>$".replace("|", r"\|")):
        ChatTemplate(loud, special_tokens={"<|im_end|>"}).render([{"role": "user", "content": "<|im_end|>"}])
    with pytest.raises(ValidationError, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert refused.value.param == "messages"


@pytest.mark.item(16)
def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(ValidationError, match="more than 1000"):
        render("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}")


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("\n{% if %}")


def test_invalid_template_is_named_by_its_origin(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{{ messages")
    tokenizer = model_with(default="{% for %}", rag="{{ x", tool_use="{% endif %}")
    for override, name in (
        (None, "the checkpoint's chat template 'tool_use'"),
        ("rag", "the checkpoint's chat template 'rag'"),
        (broken, f"--chat-template {broken}"),
        ("{{", "the chat template of --chat-template"),
    ):
        with pytest.raises(
            ConfigError, match=f"^{re.escape(name)} is not valid Jinja: line 1: .*; correct it"
        ):
            ChatTemplate.from_tokenizer(tokenizer, override)
    with pytest.raises(ConfigError, match=r"^the checkpoint's chat template is not valid Jinja"):
        ChatTemplate.from_tokenizer(model_with(default="{% for %}"))


def test_options() -> None:
    source = "{{ enable_thinking }}"
    assert render(source, enable_thinking=False) == "False"
    with pytest.raises(ValidationError, match="options are: enable_thinking") as refused:
        render(source, enable_thinkin=False)
    assert refused.value.param == "chat_template_kwargs"
    with pytest.raises(ValidationError, match="options are: none"):
        render("{{ raise_exception is defined }}", raise_exception=1)


def test_tools_and_documents_need_a_place() -> None:
    assert render("{{ tools | tojson }}", tools=[{"name": "f"}]) == '[{"name": "f"}]'
    for name in ("tools", "documents"):
        with pytest.raises(ValidationError, match="no place") as refused:
            render(CHATML, **{name: [{}]})
        assert refused.value.param == name


@folded("content", ["Well, ", "I am", "<", "<|im_end|>", "  ", "assistant"])
def test_continue_final_message(content: str) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    template = ChatTemplate(CHATML, special_tokens={"<|im_end|>", "<|im_start|>"})
    assert template.render(messages, **options).endswith("<|im_start|>assistant\n" + content)
    with pytest.raises(ValidationError, match="cannot be continued"):
        render("nothing", messages, **options)
    with pytest.raises(ValidationError) as both:
        template.render(messages, continue_final_message=True)
    assert both.value.param == "continue_final_message"


STRING_ONLY = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
BOTH = "{% for m in messages %}{{ m.role }}: {{ m.content if m.content is string else m.content[0].text }}{% endfor %}"


@folded("source", [STRING_ONLY, PARTS_ONLY, BOTH])
@folded("content", ["a\nb", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_content_format_is_found_out(source: str, content: Any) -> None:
    assert render(source, [{"role": "user", "content": content}]) == "user: a\nb"


def test_tool_call_arguments_are_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a + 1 }}{% endfor %}"
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == "2"


def model_with(**templates: str) -> SimpleNamespace:
    return SimpleNamespace(
        chat_templates=templates, bos_token=None, eos_token=None, named_tokens={}, special_tokens=frozenset()
    )


def test_template_gets_all_named_tokens() -> None:
    model = model_with(default="{{ bos_token }}{{ pad_token }}{{ image_token }}")
    model.named_tokens = {"pad_token": "<pad>", "image_token": "<image>"}
    assert ChatTemplate.from_tokenizer(model).render(HI) == "<pad><image>"


def test_override(tmp_path: Path) -> None:
    tokenizer = model_with(default="own", rag="{{ 'for documents' }}")
    file = tmp_path / "template.jinja"
    file.write_text("from file")
    assert ChatTemplate.from_tokenizer(tokenizer).render(HI) == "own"
    assert ChatTemplate.from_tokenizer(tokenizer, file).render(HI) == "from file"
    assert ChatTemplate.from_tokenizer(tokenizer, "{{ 'inline' }}").render(HI) == "inline"
    assert ChatTemplate.from_tokenizer(tokenizer, "rag").render(HI) == "for documents"
    with pytest.raises(ConfigError, match="neither a readable file nor template text nor default nor rag"):
        ChatTemplate.from_tokenizer(tokenizer, tmp_path / "missing")
    with pytest.raises(ValidationError, match="no chat template"):
        ChatTemplate.from_tokenizer(model_with())


def test_a_model_may_have_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate.from_tokenizer(model_with(default="plain", tool_use="{{ tools | length }} tools"))
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render(HI) == "plain"
    assert template.render(HI, tools=[tool]) == "1 tools"
    assert template.all_sources == "plain{{ tools | length }} tools"
    override = ChatTemplate.from_tokenizer(model_with(default="a", tool_use="{{ tools }}"), "{{ 'mine' }}")
    with pytest.raises(ValidationError, match="no place for tools"):
        override.render(HI, tools=[tool])
