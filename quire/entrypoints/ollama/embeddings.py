# SPDX-License-Identifier: Apache-2.0
"""Ollama's embeddings, POST /api/embed and /api/embeddings: routes of an installation that pools."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.ollama.models import served_name
from quire.entrypoints.ollama.options import IDLE_OPTIONS_OBJECT, paths_of
from quire.entrypoints.ollama.protocol import MODEL, WITHOUT_EFFECT
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.requests import EngineRequest
from quire.entrypoints.openai.protocol.responses import Timings
from quire.entrypoints.openai.protocol.shapes import TEXT, any_of, array, optional
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.entrypoints.openai.translation import given, note_ignored
from quire.errors import ValidationError
from quire.pooling.server.protocol import MAX_INPUTS, Numbers, PromptUsage, encoded, reply_of
from quire.pooling.server.run import (
    PooledInputs,
    PoolingJob,
    cuts_by_default,
    embed_each,
    renamed_param,
    reply_fields,
)
from quire.pooling_params import EMBED, WHOLE_CONTEXT, PoolingParams, TextOptions

router = APIRouter()
_TEXT = {**TEXT, "minLength": 1}
INPUT = any_of(TEXT, array(_TEXT, maxItems=MAX_INPUTS), {"type": "null"})


class EmbedFields(EngineRequest):
    """Shared fields of both routes; `options` have no effect on embeddings."""

    without_effect: ClassVar[tuple[str, ...]] = WITHOUT_EFFECT

    model: Annotated[str, Field(min_length=1), WithJsonSchema(MODEL)]
    options: Annotated[dict[str, Any] | None, WithJsonSchema(optional(IDLE_OPTIONS_OBJECT))] = None
    keep_alive: Any = None


class EmbedRequest(EmbedFields):
    """POST /api/embed"""

    input: Annotated[Any, WithJsonSchema(INPUT)] = None
    truncate: bool = True
    dimensions: int | None = None
    average_windows: bool = False


class OneEmbeddingRequest(EmbedFields):
    """POST /api/embeddings, the predecessor of /api/embed"""

    prompt: str = ""


class _ReplyFields(msgspec.Struct, kw_only=True):
    """Additional fields of quire's replies."""

    usage: PromptUsage
    timings: Timings
    ignored: list[str] | UnsetType = UNSET


class OllamaEmbeddings(_ReplyFields, kw_only=True):
    """Embeddings of several texts; durations are in nanoseconds."""

    model: str
    embeddings: list[Numbers]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(_ReplyFields, kw_only=True):
    embedding: Numbers


@router.post("/api/embed")
@describe(Operation((EmbedRequest,), OllamaEmbeddings, errors=(404, 504), headers=READ_HEADERS))
async def embed(request: Request) -> Response:
    """Return an embedding for each text; without texts, Ollama would load the model, which is always loaded here."""
    body, began = await read_request(request, EmbedRequest), time.monotonic_ns()
    cuts = body.truncate and cuts_by_default(body, "truncate", in_windows=body.average_windows)
    params = PoolingParams(dimensions=body.dimensions, task=EMBED)
    found = await _embedded(
        request, body, _texts(body.input), params, cuts=cuts, in_windows=body.average_windows
    )

    def made() -> OllamaEmbeddings:
        return OllamaEmbeddings(
            model=body.model,
            embeddings=[encoded(numbers, "float") for numbers in found.numbers()],
            total_duration=time.monotonic_ns() - began,
            prompt_eval_count=sum(len(one.prompt_token_ids) for one in found.pooled),
            **reply_fields(found.pooled, body.notes),
        )

    return await reply_of(found.pooled, made)


@router.post("/api/embeddings")
@describe(Operation((OneEmbeddingRequest,), OllamaEmbedding, errors=(404, 504), headers=READ_HEADERS))
async def embed_one(request: Request) -> Response:
    """Return the embedding of one text (predecessor of /api/embed)."""
    body = await read_request(request, OneEmbeddingRequest)
    found = await _embedded(request, body, [body.prompt] if body.prompt else [], PoolingParams(task=EMBED))
    vector = encoded(found.numbers()[0], "float") if found.pooled else msgspec.Raw(b"[]")
    return json_response(OllamaEmbedding(embedding=vector, **reply_fields(found.pooled, body.notes)))


async def _embedded(
    request: Request,
    body: EmbedFields,
    texts: list[str],
    params: PoolingParams,
    *,
    cuts: bool = True,
    in_windows: bool = False,
) -> PooledInputs:
    name = body.model
    body.model = served_name(server_of(request), name)
    sent = [name for name, value in (body.options or {}).items() if value is not None]
    note_ignored(body, [*given(body, WITHOUT_EFFECT), *paths_of(sent)])
    job = PoolingJob.of(request, body, "ollama-")
    body.model = name
    params = job.inputs.validated(params)
    if not texts:
        job.server.engine.input_processor.check_terms(body.priority, "", None)
        return PooledInputs([], None, False)
    options = TextOptions(WHOLE_CONTEXT if cuts else None)
    with renamed_param("input" if isinstance(body, EmbedRequest) else "prompt"):
        return await embed_each(job, texts, options, params, in_windows=in_windows)


def _texts(value: Any) -> list[str]:
    if value is None or value == "":
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValidationError("input must be text or a list of texts", param="input")
    if len(texts) > MAX_INPUTS:
        raise ValidationError(
            f"input has {len(texts)} texts; at most {MAX_INPUTS} are allowed", param="input"
        )
    return texts
