"""From the fields of a chat request to the token ids of its prompt.

Invariant: what the model's template does not read has no effect, and is noted as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.engine.tokenizer import beside_loop
from quire.entrypoints.chat.formats.model import PromptEnd
from quire.entrypoints.chat.template import OWN_VARIABLES, ChatTemplate, RenderedChat
from quire.entrypoints.openai.prompts import check_text
from quire.entrypoints.openai.protocol.requests import ChatFields
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError
from quire.inputs import Conversation

NOT_FOR_THE_MODEL = {"function": {"strict"}}
"""Of a tool: what the server does, and the model is not told."""
TEMPLATE_FIELDS = ("enable_thinking",)
"""Fields of a request that are options of the template, if it has them."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model will read it, and where its answer begins."""

    token_ids: list[int]
    end: PromptEnd


@dataclass(frozen=True)
class TextPrompt:
    """A text that the model continues as it is, in place of a conversation; with `suffix`, up to that."""

    text: str
    suffix: str = ""


async def text_prompt(
    server: ServerState, form: TextForm, fields: ChatFields, prompt: TextPrompt
) -> ChatPrompt:
    """Tokenize off the event loop.

    Raises:
        ValidationError: the text is too long, or the model was not made to fill in the middle.
    """
    check_text(server, form, prompt.text, fields)
    check_text(server, form, prompt.suffix, fields)
    encode = partial(form.fill_in.encode, suffix=prompt.suffix) if prompt.suffix else form.tokenizer.encode
    size = len(prompt.text) + len(prompt.suffix)
    token_ids = await beside_loop(size, partial(encode, add_special_tokens=True), prompt.text)
    return ChatPrompt(token_ids, PromptEnd(may_think=False))


async def chat_prompt(
    server: ServerState, form: TextForm, fields: ChatFields, *, with_tools: bool = True
) -> ChatPrompt:
    """Render and tokenize off the event loop.

    Raises:
        ValidationError: a bad message or option, the template refused the conversation, or it is too long.
    """
    if fields.continue_final_message and fields.add_generation_prompt:
        raise ValidationError(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="add_generation_prompt",
        )
    template, tokenizer = form.chat_template, form.tokenizer
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
    try:
        chat, is_off = await server.renders.run(_composed, form, fields.messages, options, extra)
    except TimeoutError:
        limit = server.renders.limit_s
        raise ValidationError(
            f"the chat template takes longer than {limit:g} s for these messages", param="messages"
        ) from None
    for name, value in chat.adjusted.items():
        fields.notes.adjust(name, value)
    check_text(server, form, chat.text, fields)
    token_ids = await beside_loop(len(chat.text), chat.encode, tokenizer)
    end = PromptEnd.of(
        chat.text, fields.messages, continues=fields.continue_final_message, may_think=not is_off
    )
    return ChatPrompt(token_ids, end)


def _composed(
    form: TextForm, messages: Conversation, options: dict[str, Any], extra: dict[str, Any]
) -> tuple[RenderedChat, bool]:
    """Compose the prompt, and tell whether thinking is off in its answer."""
    return form.chat_template.compose(messages, **options, **extra), form.thinking.is_off(extra)


def _template_options(template: ChatTemplate, fields: ChatFields) -> dict[str, Any]:
    """Those of the request's options that the template reads."""
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
    """How hard to think; a template that knows but whether to is told that."""
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
