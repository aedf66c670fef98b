"""Prompt types accepted from callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from quire.vllm_names.imports import attributes_of


class TextPrompt(TypedDict):
    """Text prompt; `cache_salt` separates its prefix-cache entries from other salts' entries."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token id prompt; `prompt` is only echoed in the output.

    `second_text_start` is the start of the second of two texts, for a pooling model with token types. The first
    `instruction_length` tokens are computed but not pooled.
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    second_text_start: NotRequired[int]
    instruction_length: NotRequired[int]


class PairPrompt(TypedDict):
    """Two texts that a pooling model reads as one, with the tokenizer's separator tokens."""

    prompt: str
    second_prompt: str
    cache_salt: NotRequired[str]


class DataPrompt(TypedDict):
    """Input of an IO processor of a pooling model."""

    data: Any


__path__: list[str] = []  # vLLM has a package of this name: `quire.inputs.data`.

# One prompt: text, token ids, or a dict with either and options.
PromptType = str | list[int] | TextPrompt | TokensPrompt | PairPrompt

# One message of a conversation: `role`, `content`, and for tools `tool_calls` or `tool_call_id`.
ChatMessage = dict[str, Any]

Conversation = Sequence[ChatMessage]

if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__)  # vLLM's names that are elsewhere
