# SPDX-License-Identifier: Apache-2.0
"""Ollama's model routes (GET /api/tags, /api/ps, /api/version, POST /api/show) and embeddings."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.entrypoints.chat.formats.selection import AnswerFormat
from quire.entrypoints.ollama.files import FileFacts, facts_of_files
from quire.entrypoints.ollama.options import IDLE_OPTIONS_OBJECT, paths_of
from quire.entrypoints.ollama.protocol import (
    MODEL,
    WITHOUT_EFFECT,
    Details,
    ListedModel,
    OllamaModelList,
    OllamaVersion,
    ShownModel,
    ShowRequest,
)
from quire.entrypoints.ollama.writer import now
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.requests import EngineRequest
from quire.entrypoints.openai.protocol.responses import Timings
from quire.entrypoints.openai.protocol.shapes import TEXT, any_of, array, optional
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.entrypoints.openai.translation import given, note_ignored
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError
from quire.pooling.server.protocol import MAX_INPUTS, Numbers, PromptUsage, encoded, reply_of
from quire.pooling.server.run import (
    Found,
    PoolingJob,
    cuts_by_default,
    embed_each,
    renamed_param,
    reply_fields,
)
from quire.pooling_params import EMBED, WHOLE_CONTEXT, PoolingParams, TextOptions

router = APIRouter()
embed_router = APIRouter()
STARTED = now()
FOREVER = "9999-12-31T23:59:59Z"
OLLAMA_VERSION = "0.12.0"  # Implemented version of Ollama's API; its clients reject older ones.

_TEXT = {**TEXT, "minLength": 1}


@router.get("/api/tags")
@describe(Operation(reply=OllamaModelList))
async def tags(request: Request) -> Response:
    """List the names under which the model is served."""
    server = server_of(request)
    facts = await _facts(server)
    return json_response(OllamaModelList([_listed(server, facts, name) for name in server.served_names]))


@router.get("/api/ps")
@describe(Operation(reply=OllamaModelList))
async def loaded(request: Request) -> Response:
    """List the same names: the model is loaded as long as the server runs."""
    server = server_of(request)
    facts = await _facts(server)
    models = [_listed(server, facts, name) for name in server.served_names]
    for model in models:
        model.expires_at, model.size_vram = FOREVER, 0
        model.context_length = server.engine.config.model.max_model_len
    return json_response(OllamaModelList(models))


@router.get("/api/version")
@describe(Operation(reply=OllamaVersion))
async def version() -> Response:
    """Return the implemented version of Ollama's API, and quire's version."""
    return json_response(OllamaVersion(OLLAMA_VERSION, __version__))


@router.post("/api/show")
@describe(Operation(body=(ShowRequest,), reply=ShownModel, errors=(404,)))
async def show(request: Request) -> Response:
    """Show a model: its family, context, template and capabilities."""
    body = await read_request(request, ShowRequest)
    server = server_of(request)
    names = [served_name(server, name) for name in (body.model, body.name) if name]
    if not names:
        raise ValidationError("model is required", param="model")
    name = names[0]
    arch, context = server.engine.config.arch, server.engine.config.model.max_model_len
    info = {
        "general.architecture": arch.model_type,
        "general.basename": name,
        f"{arch.model_type}.context_length": context,
        f"{arch.model_type}.embedding_length": arch.hidden_size,
        f"{arch.model_type}.block_count": arch.num_layers,
        f"{arch.model_type}.attention.head_count": arch.num_heads,
        f"{arch.model_type}.attention.head_count_kv": arch.num_kv_heads,
        f"{arch.model_type}.vocab_size": arch.vocab_size,
    }
    facts = await _facts(server)
    template, formats = _template(await server.form_named(name))
    can = _capabilities(server, formats)
    shown = ShownModel(
        f"FROM {name}",
        f"num_ctx {context}",
        template,
        _details(server, facts),
        info,
        can,
        facts.modified_at or STARTED,
    )
    return json_response(shown)


def served_name(server: ServerState, name: str) -> str:
    """Return a model's name; in Ollama's names the tag defaults to "latest".

    Raises:
        NotFoundError: the server does not serve it.
    """
    return server.check_model(name if name in server.served_names else name.removesuffix(":latest"))


def _capabilities(server: ServerState, formats: AnswerFormat) -> list[str]:
    spec = server.engine.config.pooling
    if spec is not None:
        return ["embedding"] if EMBED in spec.tasks else []
    own = {"tools": formats.tools, "thinking": formats.reasoning}
    return ["completion", *(name for name, form in own.items() if form is not None)]


def _template(form: TextForm) -> tuple[str, AnswerFormat]:
    """Return the chat template and the answer formats."""
    try:
        return form.chat_template.source, form.answer_format.formats
    except ValidationError:  # no chat template, or no tokenizer
        return "", AnswerFormat()


async def _facts(server: ServerState) -> FileFacts:
    """Return the facts about the served model's files, off the event loop, since they may be on a slow disk."""
    return await asyncio.to_thread(facts_of_files, server.engine.config.model_dir)


def _listed(server: ServerState, facts: FileFacts, name: str) -> ListedModel:
    return ListedModel(
        name=name,
        model=name,
        modified_at=facts.modified_at or STARTED,
        size=facts.size,
        digest=facts.digest,
        details=_details(server, facts),
    )


def _details(server: ServerState, facts: FileFacts) -> Details:
    config = server.engine.config
    family = config.arch.model_type
    level = config.quantization.quantization or facts.main_type or config.model.dtype
    return Details(family, [family], level, facts.parameter_size, facts.form)


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


@embed_router.post("/api/embed")
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


@embed_router.post("/api/embeddings")
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
) -> Found:
    name = body.model
    body.model = served_name(server_of(request), name)
    sent = [name for name, value in (body.options or {}).items() if value is not None]
    note_ignored(body, [*given(body, WITHOUT_EFFECT), *paths_of(sent)])
    job = PoolingJob.of(request, body, "ollama-")
    body.model = name
    params = job.inputs.validated(params)
    if not texts:
        job.server.engine.input_processor.check_terms(body.priority, "", None)
        return Found([], None, False)
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
