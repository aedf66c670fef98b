"""What a caller may pass as a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text; `cache_salt` separates its prefix-cache entries from other salts' entries."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is only echoed in the output.

    `second_text_start` is where the second of two texts begins, for a pooling model that tells them apart.
    `instruction_length` tokens at the start are read, and what is pooled is made of those behind them.
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    second_text_start: NotRequired[int]
    instruction_length: NotRequired[int]


class PairPrompt(TypedDict):
    """Two texts that a pooling model reads as one, with what its tokenizer puts between two texts."""

    prompt: str
    second_prompt: str
    cache_salt: NotRequired[str]


class DataPrompt(TypedDict):
    """What an IO processor reads, of a pooling model."""

    data: Any


PromptType = str | list[int] | TextPrompt | TokensPrompt | PairPrompt
"""One prompt: text, token ids, or a dict with either and options."""

ChatMessage = dict[str, Any]
"""One message of a conversation: `role`, `content`, and for tools `tool_calls` or `tool_call_id`."""

Conversation = Sequence[ChatMessage]
