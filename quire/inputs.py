# SPDX-License-Identifier: Apache-2.0
"""Prompt types accepted from callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from quire.media import MediaItem
from quire.vllm_names.imports import attributes_of


class TextPrompt(TypedDict):
    """Text prompt; `cache_salt` separates its prefix-cache entries from other salts' entries.

    `kv_transfer_params` are vLLM's (see kv_store.md).
    """

    prompt: str
    cache_salt: NotRequired[str]
    kv_transfer_params: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """Token id prompt; `prompt` is only echoed in the output.

    `second_text_start` is the start of the second of two texts, for a pooling model with token types. The first
    `instruction_length` tokens are computed but not pooled. `media` are the items that fill positions of the prompt
    with embeddings, in order of position. `leases` are objects that keep the items' files; the engine holds them until
    the request has ended.
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    kv_transfer_params: NotRequired[dict[str, Any]]
    second_text_start: NotRequired[int]
    instruction_length: NotRequired[int]
    media: NotRequired[Sequence[MediaItem]]
    leases: NotRequired[Sequence[object]]


class PairPrompt(TypedDict):
    """Two texts that a pooling model reads as one, with the tokenizer's separator tokens."""

    prompt: str
    second_prompt: str
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """Prompt that is embeddings [T, hidden size], where `prompt_is_token_ids` does not say that it is token ids.

    `prompt_embeds` is an array, a tensor, or the content of a safetensors or .npy file, as bytes or in base64. The
    other two have T entries each and go together.
    """

    prompt_embeds: Any
    prompt_token_ids: NotRequired[list[int]]
    prompt_is_token_ids: NotRequired[Any]
    cache_salt: NotRequired[str]


class DataPrompt(TypedDict):
    """Input of an IO processor of a pooling model."""

    data: Any


__path__: list[str] = []  # vLLM has a package of this name: `quire.inputs.data`.

# One prompt: text, token ids, or a dict with either and options.
PromptType = str | list[int] | TextPrompt | TokensPrompt | PairPrompt | EmbedsPrompt

# One message of a conversation: `role`, `content`, and for tools `tool_calls` or `tool_call_id`.
ChatMessage = dict[str, Any]

Conversation = Sequence[ChatMessage]

if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__)  # vLLM's names that are elsewhere
