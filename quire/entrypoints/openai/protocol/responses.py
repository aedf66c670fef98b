"""Responses, in OpenAI's shapes; a field that is UNSET is left out, None is written as null.

The last object of a reply also has `timings`, and `ignored` and `adjusted` if there is anything to tell (see `notes`).
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType, field

from quire import __version__

FINGERPRINT = f"quire-{__version__}"
"""The version, where OpenAI names what else besides the model decides an answer."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """Predictions are the drafts of speculative decoding; they are told of where there were any."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """`completion_tokens_details` is there if the model reasons, or tokens were guessed."""

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
    """Where the time of a request went, in seconds: waiting, until its first token, and from there to the last one.

    With several sequences these are the times of all together. `tokens_per_s` counts the tokens after each first one.
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


PromptPosition = dict[str, PromptLogprob]
"""Token ids, as vLLM shows the logprobs of a prompt."""


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
    """A completion, or one chunk of its stream: both have the same object name at OpenAI."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str = FINGERPRINT
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """`bytes` are the token's own where `token` has U+FFFD for a part of a character; null without a tokenizer."""

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
    """`index` is there in a stream only."""

    index: int | UnsetType = UNSET
    id: str
    function: FunctionCall


class CustomCall(msgspec.Struct):
    name: str
    input: str


class CustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    """A call of a custom tool; `index` is there in a stream only."""

    index: int | UnsetType = UNSET
    id: str
    custom: CustomCall


AnyToolCall = ToolCallMessage | CustomToolCall


class ChatMessage(msgspec.Struct):
    """What the model reasoned has two names: `reasoning_content` is the older one, which many clients read.

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
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


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
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str = FINGERPRINT
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


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
    """What a server holds; `cores` has the scheduler's counts of each."""

    num_requests: int
    num_sequences: int
    num_generations: int
    num_tasks: int
    cores: list[dict[str, int | float]]


class SleepState(msgspec.Struct):
    """Whether anything sleeps, and what: "weights", "kv_cache", "scheduling"."""

    is_sleeping: bool
    asleep: list[str]


class PrefixCacheReset(msgspec.Struct):
    reset: Literal[True] = True
