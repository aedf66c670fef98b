# SPDX-License-Identifier: Apache-2.0
"""Requests and replies of pooling models, in the forms of OpenAI, vLLM, Jina and Cohere; and encoding of numbers.

Invariant: large arrays are encoded in a thread, in pieces, so neither the event loop nor other threads are blocked.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from quire.config.pooling import PoolingSpec
from quire.engine.prompt_forms import TokenizedPrompt
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.protocol.relations import asks_nothing, both, either, has
from quire.entrypoints.openai.protocol.requests import INT64_MAX, ChatFields, EngineRequest, TokenId
from quire.entrypoints.openai.protocol.responses import PromptTokensDetails, Timings
from quire.entrypoints.openai.protocol.shapes import NULL, TEXT, any_of, array, enum, object_of, optional
from quire.errors import ValidationError
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams

T = TypeVar("T")
# Limit for encoding on the event loop (some milliseconds); larger arrays are encoded in a thread, in such pieces.
INLINE_NUMBERS = 1 << 14
# Only two threads, since they share the interpreter.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="quire-numbers")

MAX_INPUTS = 2048  # Limit of inputs per request, as OpenAI's.
_TEXT = {**TEXT, "minLength": 1}
GIVEN: dict[str, Any] = {"not": {"type": "null"}}
# Names of the two sides of a score.
SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
_WORDS = {"type": "object", "additionalProperties": {"type": "number"}}


def check_numbers(
    spec: PoolingSpec, params: PoolingParams, prompts: Sequence[TokenizedPrompt], limit: int
) -> None:
    """Check the size of the reply before anything is computed.

    Raises:
        ValidationError: the prompts would make more than `limit` numbers.
    """
    count = sum(spec.num_numbers(params, prompt.token_ids) for prompt in prompts)
    if count > limit:
        raise ValidationError(
            f"the prompt makes {count} numbers ({spec.task_of(params)}); at most {limit} are allowed "
            "(--max-pooled-numbers)",
            param="prompt",
        )


async def beside_numbers(pooled: Sequence[PoolingRequestOutput[PoolingOutput]], make: Callable[[], T]) -> T:
    """Run `make` on the pooled numbers, in a thread if there are many."""
    if sum(one.outputs.data.size for one in pooled) <= INLINE_NUMBERS:
        return make()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, make)


async def reply_of(
    pooled: Sequence[PoolingRequestOutput[PoolingOutput]], make: Callable[[], msgspec.Struct]
) -> Response:
    """Return the JSON response of `make`, which is run as in `beside_numbers`."""
    return await beside_numbers(pooled, lambda: json_response(make()))


def encoded(data: NDArray[np.float32], encoding_format: str) -> msgspec.Raw:
    """Return numbers as JSON, or as base64 of little-endian float32."""
    if encoding_format == "base64":
        return msgspec.Raw(msgspec.json.encode(base64.b64encode(data.astype("<f4").tobytes()).decode()))
    if data.size <= INLINE_NUMBERS:
        return msgspec.Raw(msgspec.json.encode(data.tolist()))
    rows = max(1, INLINE_NUMBERS * len(data) // data.size)
    pieces = [
        msgspec.json.encode(data[start : start + rows].tolist())[1:-1] for start in range(0, len(data), rows)
    ]
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


_IDS = array({"type": "integer"}, minItems=1)
INPUT = {
    **any_of(_TEXT, _IDS, array(any_of(_TEXT, _IDS), minItems=1, maxItems=MAX_INPUTS)),
    "x-rule": "prompt",
}
TEXTS = any_of(_TEXT, array(_TEXT, minItems=1, maxItems=MAX_INPUTS))
DOCUMENTS = array(any_of(_TEXT, object_of({"text": _TEXT})), minItems=1, maxItems=MAX_INPUTS)
InputField = Annotated[Any, WithJsonSchema(INPUT)]
TextsField = Annotated[Any, WithJsonSchema(optional(TEXTS))]
TRUNCATION = any_of({"type": "integer", "minimum": 1}, enum(-1, None))
Truncation = Annotated[int | None, WithJsonSchema(TRUNCATION)]
Limit = Annotated[int | None, Field(ge=1, le=INT64_MAX)]


class NumberFields(EngineRequest):
    """Shared fields of all pooling requests: truncation, and activation of the numbers."""

    truncate_prompt_tokens: Truncation = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None


class PoolingFields(NumberFields):
    """Shared fields of pooling requests with texts: their tokenization."""

    add_special_tokens: bool = True
    prompt_name: str | None = None


class PooledChatFields(NumberFields, ChatFields):
    """Shared fields of pooling requests with a conversation, which is one input; `input` must be absent."""

    input: Annotated[Any, WithJsonSchema(NULL)] = None
    add_generation_prompt: bool | None = False


class VectorFields(EngineRequest):
    """Size and encoding of vectors, and windows of long texts."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    average_windows: bool = False


class EmbeddingRequest(PoolingFields, VectorFields):
    """POST /v1/embeddings"""

    input: InputField


class EmbeddingChatRequest(PooledChatFields, VectorFields):
    """POST /v1/embeddings with messages"""


class TaskFields(VectorFields):
    """Task, and selection of the numbers."""

    task: str | None = None
    step_tag_id: TokenId | None = None
    returned_token_ids: Annotated[list[TokenId] | None, Field(min_length=1)] = None
    lexical_weights: bool = False


class PoolingRequest(PoolingFields, TaskFields):
    """POST /pooling"""

    input: InputField


class PoolingChatRequest(PooledChatFields, TaskFields):
    """POST /pooling with messages"""


class PluginRequest(EngineRequest):
    """POST /pooling with data for the server's IO processor."""

    data: Annotated[Any, WithJsonSchema(GIVEN)]
    task: Literal["plugin"] = "plugin"


class ClassifyRequest(PoolingFields):
    """POST /classify"""

    input: InputField


class ClassifyChatRequest(PooledChatFields):
    """POST /classify with messages"""


class PairFields(PoolingFields):
    """Shared fields of scores and rankings; each text is truncated to its own limit before pairing."""

    max_tokens_per_query: Limit = None
    max_tokens_per_doc: Limit = None


def _only(names: tuple[str, str]) -> dict[str, Any]:
    others = dict.fromkeys(name for sides in SIDES for name in sides if name not in names)
    return both(*(has(name, GIVEN) for name in names), *map(asks_nothing, others))


class ScoreRequest(PairFields):
    """POST /score; the texts have one of several pairs of names."""

    NAMES: ClassVar = SIDES
    relations: ClassVar[tuple[dict[str, Any], ...]] = (either(*map(_only, SIDES)),)

    text_1: TextsField = None
    text_2: TextsField = None
    data_1: TextsField = None
    data_2: TextsField = None
    queries: TextsField = None
    documents: TextsField = None
    items: TextsField = None


class RerankRequest(PairFields):
    """POST /rerank; `top_n` 0 means all."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[Any, WithJsonSchema(DOCUMENTS)]
    top_n: Annotated[int, Field(ge=0, le=INT64_MAX)] = 0
    return_documents: bool | None = None


_NUMBERS = (
    array({"type": "number"}),
    array(array({"type": "number"})),
    {"type": "string", "contentEncoding": "base64"},
)
# Numbers as JSON, or base64 of little-endian float32.
Numbers = Annotated[msgspec.Raw, Meta(extra_json_schema=any_of(*_NUMBERS))]
# Numbers, or with `lexical_weights` an object of token id -> weight.
NumbersOrWords = Annotated[msgspec.Raw, Meta(extra_json_schema=any_of(*_NUMBERS, _WORDS))]


class PromptUsage(msgspec.Struct):
    prompt_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Numbers


class PooledData(msgspec.Struct, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: NumbersOrWords


class Classification(msgspec.Struct):
    """Classification of one input; `label` is null if the model has no class names."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class _PoolingReply(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: PromptUsage
    timings: Timings
    ignored: list[str] | UnsetType = UNSET


class EmbeddingList(_PoolingReply, kw_only=True, tag_field="object", tag="list"):
    data: list[Embedding]


class PooledList(_PoolingReply, kw_only=True, tag_field="object", tag="list"):
    data: list[PooledData]


class PluginReply(_PoolingReply, kw_only=True, tag_field="object", tag="plugin"):
    """Reply of the IO processor."""

    data: msgspec.Raw


class ClassificationList(_PoolingReply, kw_only=True, tag_field="object", tag="list"):
    data: list[Classification]


class ScoreList(_PoolingReply, kw_only=True, tag_field="object", tag="list"):
    data: list[Score]


class DocumentText(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct):
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    """Ranking, best first; equal scores keep the request's order."""

    id: str
    model: str
    usage: PromptUsage
    timings: Timings
    results: list[Ranked]
    ignored: list[str] | UnsetType = UNSET
