"""From the fields of a chat request to the token ids of its prompt."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.engine.tokenizer import beside_loop
from quire.entrypoints.openai.prompts import check_text
from quire.entrypoints.openai.protocol.requests import ChatFields
from quire.entrypoints.openai.state import ServerState
from quire.errors import ValidationError


async def chat_token_ids(server: ServerState, fields: ChatFields, *, with_tools: bool = True) -> list[int]:
    """Render and tokenize off the event loop.

    Raises:
        ValidationError: a bad message or option, the template refused the conversation, or it is too long.
    """
    if fields.continue_final_message and fields.add_generation_prompt:
        raise ValidationError(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="add_generation_prompt",
        )
    template, tokenizer = server.chat_template, server.tokenizer
    options: dict[str, Any] = {
        "tools": [tool.model_dump(exclude_none=True) for tool in fields.tools or []] if with_tools else None,
        "documents": fields.documents,
        "continue_final_message": fields.continue_final_message,
        "add_generation_prompt": _add_generation_prompt(fields),
    }
    extra = fields.chat_template_kwargs or {}
    for name in extra:
        if name in options:
            raise ValidationError(
                f"chat_template_kwargs must not hold {name!r}", param="chat_template_kwargs"
            )
    chat = await asyncio.to_thread(
        template.compose, fields.messages, **{**options, "tools": options["tools"] or None}, **extra
    )
    text = chat.text
    check_text(server, text, fields)
    return await beside_loop(len(text), chat.encode, tokenizer)


def _add_generation_prompt(fields: ChatFields) -> bool:
    if fields.add_generation_prompt is None:
        return not fields.continue_final_message
    return fields.add_generation_prompt
