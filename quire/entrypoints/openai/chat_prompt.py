# SPDX-License-Identifier: Apache-2.0
"""Chat prompt construction: request fields -> chat template -> token ids.

Invariant: options that the model's template does not read have no effect, and are noted as ignored. The legacy fields
`functions` and `function_call` are translated to `tools` and `tool_choice`; errors and the answer use the legacy names,
and such an answer has at most one call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from quire.engine.tokenizer import beside_loop
from quire.entrypoints.chat.formats.model import PromptEnd
from quire.entrypoints.chat.media import ChatMedia, EncodedChat
from quire.entrypoints.chat.template import OWN_VARIABLES, ChatTemplate, RenderedChat
from quire.entrypoints.openai.prompts import check_text
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest, ChatFields, Tool
from quire.entrypoints.openai.protocol.responses import FunctionCall, ToolCallMessage
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError
from quire.inputs import Conversation

OLD_NAMES = (
    (r"tools\.(\d+)\.function", r"functions.\1"),
    (r"\btools\b", "functions"),
    ("tool_choice", "function_call"),
)

# Fields of a tool that the server handles and the template does not see.
NOT_FOR_THE_MODEL = {"function": {"strict"}}
# Request fields that are template options, if the template reads them.
TEMPLATE_FIELDS = ("enable_thinking",)


def translate(request: ChatCompletionRequest) -> None:
    """Translate legacy functions of a request to tools.

    Raises:
        ValidationError: it has both, or a function_call without functions.
    """
    choice = request.function_call
    if not request.functions:
        if choice not in (None, "none", "auto"):
            raise ValidationError("function_call needs functions", param="function_call")
        return
    if request.tools or request.tool_choice is not None:
        raise ValidationError(
            "functions cannot be sent together with tools or tool_choice", param="functions"
        )
    functions = enumerate(request.functions)
    request.show_tools([Tool.shown(function, f"tools.{index}.function") for index, function in functions])
    request.tool_choice = _tool_choice(choice)
    request.parallel_tool_calls = False


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict):
        if choice.keys() != {"name"} or not isinstance(choice["name"], str):
            raise ValidationError(
                "function_call must be auto, none or an object with a name", param="function_call"
            )
        return {"type": "function", "function": choice}
    if choice not in (None, "none", "auto"):
        raise ValidationError(
            "function_call must be auto, none or an object with a name", param="function_call"
        )
    return choice


@contextmanager
def old_names(request: ChatCompletionRequest) -> Iterator[None]:
    """Rename fields in errors from tools to functions, if the request has functions."""
    try:
        yield
    except ValidationError as error:
        if not request.functions:
            raise
        raise type(error)(_old(error.message), param=_old(error.param or "") or None) from None


def _old(text: str) -> str:
    for new, old in OLD_NAMES:
        text = re.sub(new, old, text)
    return text


def function_call(calls: Sequence[ToolCallMessage]) -> FunctionCall | UnsetType:
    """Return the first call in the legacy `function_call` form."""
    return calls[0].function if calls else UNSET


@dataclass(frozen=True)
class ChatPrompt:
    """Token ids of a conversation, and the state in which its answer begins."""

    encoded: EncodedChat
    end: PromptEnd

    @property
    def token_ids(self) -> list[int]:
        return self.encoded.token_ids


@dataclass(frozen=True)
class RawTextPrompt:
    """Raw text to continue instead of a conversation; with `suffix`, fill-in-the-middle."""

    text: str
    suffix: str = ""


async def text_prompt(
    server: ServerState, form: TextForm, fields: ChatFields, prompt: RawTextPrompt
) -> ChatPrompt:
    """Tokenize a raw text off the event loop.

    Raises:
        ValidationError: the text is too long, or the model does not support fill-in-the-middle.
    """
    check_text(server, form, prompt.text, fields)
    check_text(server, form, prompt.suffix, fields)
    encode = partial(form.fill_in.encode, suffix=prompt.suffix) if prompt.suffix else form.tokenizer.encode
    size = len(prompt.text) + len(prompt.suffix)
    token_ids = await beside_loop(size, partial(encode, add_special_tokens=True), prompt.text)
    return ChatPrompt(EncodedChat(token_ids), PromptEnd(may_think=False))


async def chat_prompt(
    server: ServerState, form: TextForm, fields: ChatFields, *, with_tools: bool = True, tenant: str = ""
) -> ChatPrompt:
    """Process the media of a conversation, render and tokenize it off the event loop. Raises as `rendered_chat`."""
    rendered = await rendered_chat(server, form, fields, with_tools=with_tools, tenant=tenant)
    chat, media = rendered.chat, rendered.media
    encoded = await beside_loop(len(chat.text), server.media.encode, chat, form.tokenizer, media.admitted)
    end = PromptEnd.of(
        chat.text, media.messages, continues=fields.continue_final_message, may_think=not rendered.is_off
    )
    return ChatPrompt(encoded, end)


class Rendered(NamedTuple):
    """Rendered conversation; `is_off`: thinking is disabled for its answer."""

    chat: RenderedChat
    media: ChatMedia
    is_off: bool


async def rendered_chat(
    server: ServerState, form: TextForm, fields: ChatFields, *, with_tools: bool = True, tenant: str = ""
) -> Rendered:
    """Process the media of a conversation and render it off the event loop.

    Args:
        tenant: owner of the names of its media.

    Raises:
        ValidationError: a message or option is invalid, the template rejected the conversation, or it is too long.
    """
    if fields.continue_final_message and fields.add_generation_prompt:
        raise ValidationError(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="add_generation_prompt",
        )
    template = form.chat_template
    options: dict[str, Any] = {
        "tools": [
            tool.model_dump(exclude_none=True, exclude=NOT_FOR_THE_MODEL) for tool in fields.shown_tools
        ]
        if with_tools
        else None,
        "documents": fields.documents,
        "continue_final_message": fields.continue_final_message,
        "add_generation_prompt": _add_generation_prompt(fields),
    }
    defaults = server.config.default_chat_template_kwargs
    extra = {**defaults, **_template_options(template, fields)}
    _note_unread_names(template, fields)
    options["tools"] = options["tools"] or None
    media = await server.media.admit(fields.messages, fields.mm_processor_kwargs, tenant)
    for name in media.idle:
        fields.notes.ignore(name)
    try:
        chat, is_off = await server.renders.run(_composed, form, media.messages, options, extra)
    except TimeoutError:
        limit = server.renders.limit_s
        raise ValidationError(
            f"the chat template takes longer than {limit:g} s for these messages", param="messages"
        ) from None
    for name, value in chat.adjusted.items():
        fields.notes.adjust(name, value)
    check_text(server, form, chat.text, fields)
    return Rendered(chat, media, is_off)


def _composed(
    form: TextForm, messages: Conversation, options: dict[str, Any], extra: dict[str, Any]
) -> tuple[RenderedChat, bool]:
    """Return the rendered prompt, and whether thinking is disabled for its answer."""
    return form.chat_template.compose(messages, **options, **extra), form.thinking.is_off(extra)


def _template_options(template: ChatTemplate, fields: ChatFields) -> dict[str, Any]:
    """Return the request's options that the template reads."""
    options: dict[str, Any] = {}
    for name in TEMPLATE_FIELDS:
        value = getattr(fields, name)
        if value is not None and _is_read(template, fields, name, name):
            options[name] = value
    if fields.reasoning_effort is not None:
        options.update(_effort(template, fields, fields.reasoning_effort))
    for name, value in (fields.chat_template_kwargs or {}).items():
        if name in OWN_VARIABLES:
            raise ValidationError(
                f"chat_template_kwargs must not hold {name!r}", param="chat_template_kwargs"
            )
        if _is_read(template, fields, name, f"chat_template_kwargs.{name}"):
            options[name] = value
    return options


def _effort(template: ChatTemplate, fields: ChatFields, effort: str) -> dict[str, Any]:
    """Return the reasoning effort as a template option: `reasoning_effort`, or `enable_thinking` if only that
    is read."""
    if "reasoning_effort" in template.variables or "enable_thinking" not in template.variables:
        is_read = _is_read(template, fields, "reasoning_effort", "reasoning_effort")
        return {"reasoning_effort": effort} if is_read else {}
    return {} if fields.enable_thinking is not None else {"enable_thinking": effort != "none"}


def _is_read(template: ChatTemplate, fields: ChatFields, name: str, shown: str) -> bool:
    if name not in template.variables:
        fields.notes.ignore(shown, template.variables - OWN_VARIABLES)
    return name in template.variables


def _note_unread_names(template: ChatTemplate, fields: ChatFields) -> None:
    roles = [message.get("role") for message in fields.messages if message.get("name") is not None]
    if any(isinstance(role, str) and not template.reads_name(role) for role in roles):
        fields.notes.ignore("messages[].name")


def _add_generation_prompt(fields: ChatFields) -> bool:
    if fields.add_generation_prompt is None:
        return not fields.continue_final_message
    return fields.add_generation_prompt
