# SPDX-License-Identifier: Apache-2.0
"""Request models of strict pydantic types.

Invariant: a model has exactly the supported fields; `quire.entrypoints.openai.parsing` handles all others, and `notes`
records them for the reply. `SamplingParams` checks ranges, for all entry points alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from quire.entrypoints.openai.notes import RequestNotes
from quire.entrypoints.openai.protocol import relations as related
from quire.entrypoints.openai.protocol import shapes
from quire.entrypoints.openai.protocol.constraints import ConstraintFields
from quire.errors import DeadlineError
from quire.sampling_extras import MAX_PATTERN_COUNT, MAX_PATTERN_SIZE

INT64_MAX = 2**63 - 1
TokenId = Annotated[int, Field(ge=0, le=INT64_MAX)]
# Text, token ids, or a list of either; read by `quire.entrypoints.openai.prompts` with clearer errors.
PromptField = Annotated[Any, WithJsonSchema(shapes.PROMPT)]
Objects = list[dict[str, Any]]
Messages = Annotated[
    Objects, Field(min_length=1, max_length=shapes.MAX_MESSAGES), WithJsonSchema(shapes.MESSAGES)
]
TemplateOptions = Annotated[dict[str, Any] | None, WithJsonSchema(shapes.optional(shapes.TEMPLATE_OPTIONS))]
ToolChoice = Annotated[
    str | dict[str, Any] | None, WithJsonSchema(shapes.any_of(shapes.TOOL_CHOICE, shapes.enum("any")))
]


class RequestModel(BaseModel):
    """Base of all requests."""

    # Unsupported fields are filtered before; the published schema allows any field.
    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"additionalProperties": True})
    # Whether it generates text, so that unsupported samplers are rejected (`field_rules.REFUSED_SAMPLERS`).
    samples: ClassVar[bool] = False
    # Rules of objects in the request, if they differ from chat's.
    inner: ClassVar[Mapping[str, Any] | None] = None
    without_effect: ClassVar[tuple[str, ...]] = ()  # Fields that are checked and have no effect.
    # Relations between fields, for the OpenAPI document.
    relations: ClassVar[tuple[dict[str, Any], ...]] = ()
    _notes: RequestNotes = PrivateAttr(default_factory=RequestNotes)

    @property
    def notes(self) -> RequestNotes:
        """Notes for the reply."""
        return self._notes

    def with_notes(self, notes: RequestNotes) -> Self:
        """Attach the notes taken while the request was read."""
        self._notes = notes
        return self


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class RepetitionDetection(RequestModel):
    """Stop criterion for repetitive text (`quire.sampling_params.RepetitionDetectionParams`)."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"additionalProperties": False})
    max_pattern_size: int = Field(0, ge=0, le=MAX_PATTERN_SIZE)
    min_pattern_size: int = Field(0, ge=0, le=MAX_PATTERN_SIZE)
    min_count: int = Field(0, ge=0, le=MAX_PATTERN_COUNT)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """Drop nulls, which mean absent; unlike elsewhere, unknown fields are rejected."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class EngineRequest(RequestModel):
    """Fields of all requests to the engine."""

    model: str | None = None
    priority: int = Field(0, ge=-INT64_MAX - 1, le=INT64_MAX)
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    user: str | None = Field(None, max_length=256)
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    _trace_headers: dict[str, str] = PrivateAttr(default_factory=dict)
    _replica: int | None = PrivateAttr(None)
    _arrived: float = PrivateAttr(default_factory=time.monotonic)

    @property
    def trace_headers(self) -> dict[str, str]:
        """Trace headers of the request, if it is part of a trace."""
        return self._trace_headers

    def join_trace(self, headers: dict[str, str]) -> None:
        self._trace_headers = headers

    @property
    def replica(self) -> int | None:
        """Number of the requested replica."""
        return self._replica

    def choose_replica(self, number: int | None) -> None:
        self._replica = number

    def time_left(self) -> float | None:
        """Return the remaining seconds of `timeout`, counted from the request's arrival; None: unlimited.

        Raises:
            DeadlineError: no time is left.
        """
        if self.timeout is None:
            return None
        left = self._arrived + self.timeout - time.monotonic()
        if left <= 0:
            raise DeadlineError("the request timed out before processing began")
        return left


class SamplerFields(RequestModel):
    """Samplers of every request for generated text; None is the model's or the sampler's default."""

    samples: ClassVar[bool] = True

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    penalty_last_n: int | None = None
    seed: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    temperature_last: bool | None = None


SAMPLERS = tuple(SamplerFields.model_fields)


class GenerationRequest(EngineRequest, SamplerFields, ConstraintFields):
    """Shared fields of completions and chat completions; None is the model's or the field's default."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    logprob_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    stream_interval: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=INT64_MAX)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    relations: ClassVar[tuple[dict[str, Any], ...]] = related.OF_COMPLETIONS

    max_tokens: Annotated[int | None, WithJsonSchema(shapes.COMPLETION_MAX_TOKENS)] = None
    prompt: PromptField
    # Base64 of files, of which no schema can tell which are right.
    prompt_embeds: SkipJsonSchema[Any] = None
    add_special_tokens: bool = True
    suffix: str | None = None
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    # Language tokens of a translator, which is all that can tell which are right.
    source_language: str | None = Field(None, min_length=1, max_length=64)
    target_language: str | None = Field(None, min_length=1, max_length=64)


class ToolFunction(RequestModel):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(RequestModel):
    """A tool with free text in place of arguments."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    format: dict[str, Any] | None = None


class OfferedTool(RequestModel):
    """A tool as a client describes it; tools of types other than these two are ignored."""

    type: str = Field(min_length=1)
    function: ToolFunction | None = None
    custom: CustomTool | None = None


class Tool(RequestModel):
    """A tool that the model is shown."""

    type: Literal["function"] = "function"
    function: ToolFunction
    _place: str = PrivateAttr("")
    _is_custom: bool = PrivateAttr(False)

    @property
    def place(self) -> str:
        """Path of the tool's function in the request, for errors."""
        return self._place

    @property
    def is_custom(self) -> bool:
        """True for a custom tool, whose calls have text in place of arguments."""
        return self._is_custom

    @classmethod
    def shown(cls, function: ToolFunction, place: str, *, is_custom: bool = False) -> Self:
        tool = cls(function=function)
        tool._place, tool._is_custom = place, is_custom
        return tool


class ChatFields(RequestModel):
    """Fields that determine how a conversation becomes a prompt."""

    relations: ClassVar[tuple[dict[str, Any], ...]] = (related.CONTINUED,)

    messages: Messages
    tools: Annotated[list[OfferedTool] | None, WithJsonSchema(shapes.optional(shapes.LOOSE_TOOLS))] = None
    _shown_tools: list[Tool] = PrivateAttr(default_factory=list)
    _left_out: list[str] = PrivateAttr(default_factory=list)
    documents: Annotated[Objects | None, WithJsonSchema(shapes.DOCUMENTS)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateOptions = None
    mm_processor_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None

    @property
    def shown_tools(self) -> list[Tool]:
        """Functions to show to the model."""
        return self._shown_tools

    @property
    def left_out(self) -> list[str]:
        """Types of the request's tools that this server does not support."""
        return self._left_out

    def show_tools(self, tools: list[Tool], left_out: Sequence[str] = ()) -> None:
        self._shown_tools, self._left_out = tools, list(left_out)


class ChatCompletionRequest(GenerationRequest, ChatFields):
    """POST /v1/chat/completions"""

    relations: ClassVar[tuple[dict[str, Any], ...]] = related.OF_CHATS

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    functions: list[ToolFunction] | None = None
    function_call: Annotated[str | dict[str, Any] | None, WithJsonSchema(shapes.FUNCTION_CALL)] = None
    include_reasoning: bool = True


def _without(*fields: str) -> ConfigDict:
    """Return the config of one of several request forms; the fields of the other forms must be null."""

    def describe(schema: dict[str, Any]) -> None:
        schema["properties"] |= dict.fromkeys(fields, shapes.NULL)
        schema["additionalProperties"] = True

    return ConfigDict(json_schema_extra=describe)


class TokenizeRequest(RequestModel):
    """POST /tokenize with a prompt"""

    model_config = _without("messages", "content")
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatFields):
    """POST /tokenize with messages"""

    model_config = _without("prompt", "content")
    model: str | None = None
    return_token_strs: bool = False


class TokenizeContentRequest(RequestModel):
    """POST /tokenize with llama-server's fields"""

    model_config = _without("prompt", "messages")
    model: str | None = None
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: Annotated[Any, WithJsonSchema(shapes.enum(False, None))] = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]
