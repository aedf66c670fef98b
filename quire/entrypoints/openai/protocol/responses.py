# SPDX-License-Identifier: Apache-2.0
"""Response structs in OpenAI's shapes; UNSET fields are omitted, None is written as null.

The last object of a reply also has `timings`, and `ignored` and `adjusted` unless they are empty (see `notes`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType, field

from quire import __version__

FINGERPRINT = f"quire-{__version__}"  # The version; OpenAI names the backend configuration here.


class PromptTokensDetails(msgspec.Struct):
    """Token details; `stored_tokens` are the cached ones that came from --kv-store, omitted if none did.

    `image_tokens`, `video_tokens` and `audio_tokens` are those in whose place media are, omitted if there are none.
    """

    cached_tokens: int = 0
    stored_tokens: int | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct):
    """Token details; predictions are speculative decoding's drafts, omitted if there were none."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Token counts; `completion_tokens_details` is present if the model reasons or drafts tokens."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @property
    def reasoning_tokens(self) -> int:
        details = self.completion_tokens_details
        return 0 if details is UNSET else details.reasoning_tokens


class Timings(msgspec.Struct):
    """Times of a request in seconds: queueing, until the first token, and from there to the last one.

    With several sequences these cover all of them. `tokens_per_s` excludes each sequence's first token.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists with one entry per token; `text_offset` counts characters from the start of the choice."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptPosition = dict[str, PromptLogprob]  # Token id -> logprob, as vLLM shows prompt logprobs.


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[PromptPosition | None] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A completion, or one chunk of its stream: OpenAI gives both the same object name."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str = FINGERPRINT
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """One alternative; `bytes` are the token's own where `token` has U+FFFD; null without a tokenizer."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCallMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """Tool call; `index` is present in streams only."""

    index: int | UnsetType = UNSET
    id: str
    function: FunctionCall


class CustomCall(msgspec.Struct):
    name: str
    input: str


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    """Call of a custom tool; `index` is present in streams only."""

    index: int | UnsetType = UNSET
    id: str
    custom: CustomCall


AnyToolCall = ToolCallMessage | CustomToolCall


class ChatMessage(msgspec.Struct):
    """Message of an answer; `reasoning_content` is the older name of `reasoning`, which many clients read.

    A call is a `function_call` if the request had functions.
    """

    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[AnyToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """Choice of an answer; `task_answer` is its text in parsed form, for a task about an image (Florence-2)."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    task_answer: dict[str, Any] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str = FINGERPRINT
    prompt_logprobs: list[PromptPosition | None] | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[AnyToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """Part of a choice; its last one has the `task_answer` of `ChatChoice`."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    task_answer: dict[str, Any] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str = FINGERPRINT
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


class Modalities(msgspec.Struct):
    """Kinds of input and output, in llama.cpp's form."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int
    architecture: Modalities


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """The text, under vLLM's name and under llama-server's."""

    prompt: str
    content: str


class TokenizerInfo(msgspec.Struct):
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    special_tokens: list[str]
    vocab_size: int
    model_max_length: int


class Version(msgspec.Struct):
    version: str


class Integrity(msgspec.Struct):
    """Resources in use; `cores` has the scheduler's counts of each core."""

    num_requests: int
    num_sequences: int
    num_generations: int
    num_tasks: int
    cores: list[dict[str, int | float]]


class SleepState(msgspec.Struct):
    """Sleep state of the engine; `asleep` lists "weights", "kv_cache", "scheduling"."""

    is_sleeping: bool
    asleep: list[str]


class EncoderCacheReset(msgspec.Struct):
    """Reply of /reset_encoder_cache; false: embeddings that requests use have stayed."""

    reset: bool


class PrefixCacheReset(msgspec.Struct):
    reset: Literal[True] = True
