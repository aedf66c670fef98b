"""From the fields of a chat request to the token ids of its prompt."""

from __future__ import annotations

from typing import Any

from quire.entrypoints.openai.protocol.requests import ChatFields
from quire.entrypoints.openai.state import ServerState
from quire.errors import ValidationError


async def chat_token_ids(server: ServerState, fields: ChatFields, *, with_tools: bool = True) -> list[int]:
    """Render and tokenize off the event loop.

    Raises:
        ValidationError: a bad message or option, or the template refused the conversation.
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
    options["tools"] = options["tools"] or None
    try:
        return await server.renders.run(template.encode, tokenizer, fields.messages, **options, **extra)
    except TimeoutError:
        limit = server.renders.limit_s
        raise ValidationError(
            f"the chat template takes longer than {limit:g} s for these messages", param="messages"
        ) from None


def _add_generation_prompt(fields: ChatFields) -> bool:
    if fields.add_generation_prompt is None:
        return not fields.continue_final_message
    return fields.add_generation_prompt
