# SPDX-License-Identifier: Apache-2.0
"""POST /v2/embed, Cohere's embedding API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from fastapi import APIRouter
from msgspec import UNSET, UnsetType, field
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.field_rules import FieldRules
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.relations import asks_nothing, both, either, has
from quire.entrypoints.openai.protocol.requests import EngineRequest
from quire.entrypoints.openai.protocol.responses import Timings
from quire.entrypoints.openai.protocol.shapes import TEXT, array, enum, object_of, optional
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.errors import ValidationError
from quire.pooling.inputs import DOCUMENT, QUERY, PoolingInputs
from quire.pooling.server.protocol import GIVEN, MAX_INPUTS, Numbers, PromptUsage, encoded, reply_of
from quire.pooling.server.run import PoolingJob, cuts_by_default, embed_each, renamed_param, reply_fields
from quire.pooling_params import EMBED, WHOLE_CONTEXT, PoolingParams, TextOptions

router = APIRouter()
# Input types for which a model may have a prompt.
SIDES = {"search_query": QUERY, "search_document": DOCUMENT}
Kind = Literal["float", "base64", "binary", "ubinary"]
CUT = {"NONE": None, "START": "left", "END": "right"}
_TEXT = {**TEXT, "minLength": 1}
_PART = object_of({"type": enum("text"), "text": _TEXT})
INPUTS = array(object_of({"content": array(_PART, minItems=1, maxItems=1)}), minItems=1, maxItems=MAX_INPUTS)
MAX_TOKENS = {**optional({"type": "integer", "minimum": 1}), "x-rule": "any number"}
TEXTS = array(_TEXT, minItems=1, maxItems=MAX_INPUTS)


class CohereEmbedRequest(EngineRequest):
    """POST /v2/embed with `texts`, or `inputs` of one text each."""

    relations: ClassVar[tuple[dict[str, Any], ...]] = (
        either(
            both(has("texts", GIVEN), asks_nothing("inputs")),
            both(has("inputs", GIVEN), asks_nothing("texts")),
        ),
    )

    inner: ClassVar = {
        "inputs": FieldRules(
            frozenset({"content"}), inner={"content": FieldRules(frozenset({"type", "text", "image_url"}))}
        )
    }

    input_type: Literal["search_query", "search_document", "classification", "clustering"] | None = None
    texts: Annotated[Any, WithJsonSchema(optional(TEXTS))] = None
    inputs: Annotated[Any, WithJsonSchema(optional(INPUTS))] = None
    images: Annotated[Any, WithJsonSchema(optional(array({}, maxItems=0)))] = None
    embedding_types: Annotated[list[Kind] | None, Field(min_length=1)] = None
    output_dimension: int | None = None
    max_tokens: Annotated[int | None, WithJsonSchema(MAX_TOKENS)] = None
    truncate: Literal["NONE", "START", "END"] = "END"
    average_windows: bool = False


class ByType(msgspec.Struct):
    """The requested types, with an entry for each text."""

    float: list[Numbers] | UnsetType = UNSET
    base64: list[Numbers] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class BilledUnits(msgspec.Struct):
    input_tokens: int


class ApiVersion(msgspec.Struct):
    version: str = "2"


class CohereMeta(msgspec.Struct):
    billed_units: BilledUnits
    api_version: ApiVersion = field(default_factory=ApiVersion)


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    id: str
    embeddings: ByType
    texts: list[str]
    meta: CohereMeta
    usage: PromptUsage
    timings: Timings
    ignored: list[str] | UnsetType = UNSET
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


@router.post("/v2/embed")
@describe(Operation((CohereEmbedRequest,), CohereEmbeddings, errors=(404, 504), headers=READ_HEADERS))
async def embed(request: Request) -> Response:
    """Return an embedding for each text, in Cohere's form."""
    body = await read_request(request, CohereEmbedRequest)
    job = PoolingJob.of(request, body, "embd-")
    name, texts = _texts_of(body)
    options = _options(body, job.inputs)
    with renamed_param(name), renamed_param("output_dimension", "dimensions"):
        params = PoolingParams(dimensions=body.output_dimension, task=EMBED)
        found = await embed_each(job, texts, options, params, in_windows=body.average_windows)
    pooled = found.pooled

    def made() -> CohereEmbeddings:
        vectors = found.numbers()
        kinds = body.embedding_types or ["float"]
        by_type = ByType(**{kind: [_typed(one, kind) for one in vectors] for kind in kinds})
        meta = CohereMeta(BilledUnits(sum(len(one.prompt_token_ids) for one in pooled)))
        common = reply_fields(pooled, body.notes)
        return CohereEmbeddings(id=job.id, embeddings=by_type, texts=texts, meta=meta, **common)

    return await reply_of(pooled, made)


def _options(body: CohereEmbedRequest, inputs: PoolingInputs) -> TextOptions:
    """Return the text options: Cohere truncates by default; `max_tokens` is at most the context."""
    side, limit = CUT[body.truncate], inputs.config.model.max_model_len
    if body.max_tokens is not None and body.max_tokens < 1:
        raise ValidationError(f"max_tokens must be at least 1, got {body.max_tokens}", param="max_tokens")
    names = SIDES.get(body.input_type or "")
    prompt = None if names is None else inputs.prompt_named(names)
    cuts = cuts_by_default(body, "truncate", "max_tokens", in_windows=body.average_windows)
    if side is None or not cuts:
        return TextOptions(prompt_name=prompt)
    most = WHOLE_CONTEXT if body.max_tokens is None else min(body.max_tokens, limit)
    return TextOptions(most, side, prompt)


def _texts_of(body: CohereEmbedRequest) -> tuple[str, list[str]]:
    """Return the name of the field with the texts, and the texts."""
    if body.images not in (None, []):
        raise ValidationError("images cannot be embedded by this model", param="images")
    if (body.texts is None) == (body.inputs is None):
        raise ValidationError("either texts or inputs are needed", param="texts")
    name = "texts" if body.inputs is None else "inputs"
    given = body.texts if body.inputs is None else body.inputs
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_INPUTS:
        raise ValidationError(f"{name} must be a list of 1 to {MAX_INPUTS}", param=name)
    texts = given if name == "texts" else list(map(_text_of, given))
    if not all(isinstance(text, str) and text for text in texts):
        raise ValidationError(f"{name} must be texts that are not empty", param=name)
    return name, texts


def _text_of(one: Any) -> Any:
    content = one.get("content") if isinstance(one, dict) else None
    parts = content if isinstance(content, list) else []
    if len(parts) != 1 or not isinstance(parts[0], dict) or parts[0].get("type") != "text":
        raise ValidationError("each of inputs must have a content of one part of type text", param="inputs")
    return parts[0].get("text")


def _typed(vector: NDArray[np.float32], kind: str) -> Any:
    """Return one embedding; a binary one packs eight signs per byte, the first in the highest bit."""
    if kind in ("float", "base64"):
        return encoded(vector, kind)
    signs = np.packbits(vector > 0).astype(np.int64)
    packed: list[int] = (signs if kind == "ubinary" else signs - 128).tolist()
    return packed
