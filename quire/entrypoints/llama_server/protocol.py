# SPDX-License-Identifier: Apache-2.0
"""llama-server's requests and replies; UNSET fields are omitted.

Invariant: every option of llama-server's /completion is a field here. It is honored, has no effect on the answer
(`WITHOUT_EFFECT`), or is rejected unless it is neutral (`REJECTED`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, WithJsonSchema

from quire.entrypoints.openai.field_rules import FieldRules, RejectedField
from quire.entrypoints.openai.protocol import shapes
from quire.entrypoints.openai.protocol.constraints import JsonSchema, PatternField
from quire.entrypoints.openai.protocol.relations import asks_nothing, either
from quire.entrypoints.openai.protocol.requests import ChatFields, EngineRequest, SamplerFields, TokenId
from quire.entrypoints.openai.protocol.responses import Usage
from quire.entrypoints.openai.protocol.shapes import TEXT, any_of, array, enum, object_of, optional

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "cache_prompt": (True,),
    "id_slot": (-1,),
    "n_cache_reuse": (0,),
    "n_discard": (0,),
    "n_keep": (0,),
}  # Options about the cache, which the server manages itself -> their values that ask for nothing.
REJECTED: Mapping[str, RejectedField] = {
    "lora": RejectedField(([],), "is not supported; name the adapter as the model"),
    "n_cmpl": RejectedField((1,), "is not supported; send the request several times, with different seeds"),
    "n_indent": RejectedField((0,)),
    "post_sampling_probs": RejectedField((False,)),
    "response_fields": RejectedField(([],), "is not supported; a reply has all of its fields"),
    "return_progress": RejectedField((False,)),
    "t_max_predict_ms": RejectedField((0, -1), "is not supported; send timeout, in seconds"),
}
EXTRA_RULES = FieldRules(frozenset({"filename", "text"}))
MAX_EXTRAS = 1024

_WORD = {**TEXT, "minLength": 1}
_IDS = {"type": "integer", "minimum": 0}
_PARTS = array(any_of(_WORD, _IDS), minItems=1)
_PROMPT_OBJECT = object_of({"prompt_string": _WORD}, {"multimodal_data": array({}, maxItems=0)})
_PROMPT = any_of(_WORD, _PARTS, _PROMPT_OBJECT)
PROMPT = {**any_of(_PROMPT, array(_PROMPT, minItems=1, maxItems=shapes.MAX_PROMPTS)), "x-rule": "prompt"}
_BIAS = any_of({"type": "number", "minimum": -100, "maximum": 100}, enum(False))
_BIASED = {"type": "array", "prefixItems": [any_of(_IDS, TEXT), _BIAS], "minItems": 2, "maxItems": 2}
BIAS = {
    **any_of({"type": "object", "additionalProperties": _BIAS}, array(_BIASED), {"type": "null"}),
    "x-rule": "biases_by_text",
}
LIMIT = {**any_of(enum(-1), {"type": "integer"}, {"type": "null"}), "x-rule": "completion_max_tokens"}
EXTRA = optional(array(object_of({"text": TEXT}, {"filename": TEXT}), maxItems=MAX_EXTRAS))


def _neutral(name: str) -> Any:
    """Return the schema of the neutral values; with its type, since pydantic takes 0 and false for one schema."""
    values = REJECTED[name].neutral
    numbers = {"type": "integer"} if all(type(value) is int for value in values) else {}
    return WithJsonSchema(any_of({**numbers, **enum(*values)}, {"type": "null"}))


class GeneratingRequest(EngineRequest, SamplerFields):
    """Shared fields of /completion and /infill; `max_tokens` is another name of `n_predict`."""

    without_effect: ClassVar[tuple[str, ...]] = tuple(WITHOUT_EFFECT)
    relations: ClassVar[tuple[dict[str, Any], ...]] = (
        either(asks_nothing("grammar", ""), asks_nothing("json_schema")),
        either(asks_nothing("n_predict"), asks_nothing("max_tokens")),
    )

    n_predict: Annotated[int | None, WithJsonSchema(LIMIT)] = None
    max_tokens: Annotated[int | None, WithJsonSchema(LIMIT)] = None
    stream: bool = False
    stop: Annotated[
        str | list[str] | None, WithJsonSchema({**optional(any_of(TEXT, array(TEXT))), "x-rule": "stop"})
    ] = None
    ignore_eos: bool = False
    logit_bias: Annotated[Any, WithJsonSchema(BIAS)] = None
    grammar: PatternField = None
    json_schema: JsonSchema = None
    n_probs: Annotated[
        int, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}], "x-rule": "logprobs"})
    ] = Field(0, ge=0)
    return_tokens: bool = False
    timings_per_token: bool = False
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_cache_reuse: int | None = None
    n_discard: int | None = None
    n_keep: int | None = None
    lora: Annotated[Any, _neutral("lora")] = None
    n_cmpl: Annotated[Any, _neutral("n_cmpl")] = None
    n_indent: Annotated[Any, _neutral("n_indent")] = None
    post_sampling_probs: Annotated[Any, _neutral("post_sampling_probs")] = None
    response_fields: Annotated[Any, _neutral("response_fields")] = None
    return_progress: Annotated[Any, _neutral("return_progress")] = None
    t_max_predict_ms: Annotated[Any, _neutral("t_max_predict_ms")] = None


class PromptRequest(GeneratingRequest):
    """POST /completion"""

    inner: ClassVar[Mapping[str, FieldRules]] = {}

    prompt: Annotated[Any, WithJsonSchema(PROMPT)]


class InfillRequest(GeneratingRequest):
    """POST /infill: the text between `input_prefix` and `input_suffix`, which begins with `prompt`."""

    inner: ClassVar[Mapping[str, FieldRules]] = {"input_extra": EXTRA_RULES}

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: Annotated[list[dict[str, Any]] | None, WithJsonSchema(EXTRA)] = Field(
        None, max_length=MAX_EXTRAS
    )


class TemplateRequest(ChatFields):
    """POST /apply-template"""

    model: str | None = None


class ContentRequest(EngineRequest):
    """POST /embedding"""

    content: Annotated[
        Any,
        WithJsonSchema(
            {
                **any_of(
                    _WORD, array(_IDS, minItems=1), array(any_of(_WORD, array(_IDS, minItems=1)), minItems=1)
                ),
                "x-rule": "prompt",
            }
        ),
    ]
    embd_normalize: Annotated[int | None, WithJsonSchema(enum(2, -1, None))] = None


class OneToken(msgspec.Struct, kw_only=True):
    """One token with its logarithmic probability before sampling."""

    id: TokenId
    token: str
    bytes: list[int]
    logprob: float


class TokenChoice(OneToken, kw_only=True):
    top_logprobs: list[OneToken]


class LlamaTimings(msgspec.Struct, kw_only=True):
    """Tokens and milliseconds; the prompt's tokens are those that were computed, without `cache_n`."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class LlamaCompletion(msgspec.Struct, kw_only=True):
    """A text, the end of a streamed one, or a new part of it, which has no `model` and no field after it.

    `usage`, `ignored` and `adjusted` are quire's own.
    """

    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    timings: LlamaTimings | UnsetType = UNSET
    completion_probabilities: list[TokenChoice] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adjusted: dict[str, int | str | bool] | UnsetType = UNSET


class AppliedTemplate(msgspec.Struct):
    prompt: str


class DefaultSettings(msgspec.Struct):
    n_ctx: int
    params: dict[str, Any]


class ModelModalities(msgspec.Struct):
    vision: bool
    audio: bool


class Properties(msgspec.Struct, kw_only=True):
    """Reply of /props; `total_slots` is the number of sequences that are computed at a time."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: ModelModalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class ServerSlot(msgspec.Struct, kw_only=True):
    """One sequence in flight as a slot, or a free place; prompts are not shown."""

    id: int
    id_task: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    request_id: str = ""
    status: str = ""
