"""Requests for what a model pools, and their replies, in the shapes of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import Field, WithJsonSchema

from quire.entrypoints.openai.protocol.relations import asks_nothing, both, either, has
from quire.entrypoints.openai.protocol.requests import INT64_MAX, EngineRequest, TokenId
from quire.entrypoints.openai.protocol.responses import PromptTokensDetails, Timings
from quire.entrypoints.openai.protocol.shapes import TEXT, any_of, array, enum, object_of, optional

MAX_INPUTS = 2048
"""Of one request; OpenAI has the same limit."""
_TEXT = {**TEXT, "minLength": 1}
_IDS = array({"type": "integer"}, minItems=1)
INPUT = {
    **any_of(_TEXT, _IDS, array(any_of(_TEXT, _IDS), minItems=1, maxItems=MAX_INPUTS)),
    "x-rule": "prompt",
}
TEXTS = any_of(_TEXT, array(_TEXT, minItems=1, maxItems=MAX_INPUTS))
DOCUMENTS = array(any_of(_TEXT, object_of({"text": _TEXT})), minItems=1, maxItems=MAX_INPUTS)
GIVEN: dict[str, Any] = {"not": {"type": "null"}}
InputField = Annotated[Any, WithJsonSchema(INPUT)]
TextsField = Annotated[Any, WithJsonSchema(optional(TEXTS))]
TRUNCATION = any_of({"type": "integer", "minimum": 1}, enum(-1, None))
Truncation = Annotated[int | None, WithJsonSchema(TRUNCATION)]
Limit = Annotated[int | None, Field(ge=1, le=INT64_MAX)]


class PoolingFields(EngineRequest):
    """What all requests to a pooling model share: how their texts become tokens, and what is done to the numbers."""

    truncate_prompt_tokens: Truncation = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = None
    use_activation: bool | None = None


class EmbeddingRequest(PoolingFields):
    """POST /v1/embeddings"""

    input: InputField
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    average_windows: bool = False


class PoolingRequest(PoolingFields):
    """POST /pooling"""

    input: InputField
    task: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    step_tag_id: TokenId | None = None
    returned_token_ids: Annotated[list[TokenId] | None, Field(min_length=1)] = None
    average_windows: bool = False
    lexical_weights: bool = False


class PluginRequest(EngineRequest):
    """POST /pooling with what the server's IO processor reads."""

    data: Annotated[Any, WithJsonSchema(GIVEN)]
    task: Literal["plugin"] = "plugin"


class ClassifyRequest(PoolingFields):
    """POST /classify"""

    input: InputField


class PairFields(PoolingFields):
    """What scores and rankings share; a text is cut to its own limit before it is made part of a pair."""

    max_tokens_per_query: Limit = None
    max_tokens_per_doc: Limit = None


SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""What requests call the two sides of a score."""


def _only(names: tuple[str, str]) -> dict[str, Any]:
    others = dict.fromkeys(name for sides in SIDES for name in sides if name not in names)
    return both(*(has(name, GIVEN) for name in names), *map(asks_nothing, others))


class ScoreRequest(PairFields):
    """POST /score; the texts come under one of several pairs of names."""

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
    """POST /rerank; `top_n` 0 is all."""

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[Any, WithJsonSchema(DOCUMENTS)]
    top_n: Annotated[int, Field(ge=0, le=INT64_MAX)] = 0
    return_documents: bool | None = None


_NUMBERS = (
    array({"type": "number"}),
    array(array({"type": "number"})),
    {"type": "string", "contentEncoding": "base64"},
)
_WORDS = {"type": "object", "additionalProperties": {"type": "number"}}
Numbers = Annotated[msgspec.Raw, Meta(extra_json_schema=any_of(*_NUMBERS))]
"""Numbers as JSON, or base64 of little-endian float32 ones."""
NumbersOrWords = Annotated[msgspec.Raw, Meta(extra_json_schema=any_of(*_NUMBERS, _WORDS))]
"""The same, or with `lexical_weights` token id -> weight."""


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
    """`label` is null where the model has no names for its classes."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class _Reply(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: PromptUsage
    timings: Timings
    ignored: list[str] | UnsetType = UNSET


class EmbeddingList(_Reply, kw_only=True, tag_field="object", tag="list"):
    data: list[Embedding]


class PooledList(_Reply, kw_only=True, tag_field="object", tag="list"):
    data: list[PooledData]


class PluginReply(_Reply, kw_only=True, tag_field="object", tag="plugin"):
    """`data` is what the IO processor makes."""

    data: msgspec.Raw


class ClassificationList(_Reply, kw_only=True, tag_field="object", tag="list"):
    data: list[Classification]


class ScoreList(_Reply, kw_only=True, tag_field="object", tag="list"):
    data: list[Score]


class DocumentText(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct):
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    """Best first, equal ones in the order in which they came."""

    id: str
    model: str
    usage: PromptUsage
    timings: Timings
    results: list[Ranked]
    ignored: list[str] | UnsetType = UNSET
