# SPDX-License-Identifier: Apache-2.0
"""Ollama's model routes (GET /api/tags, /api/ps, /api/version, POST /api/show).

Facts about the served model's files are read once, and shown as Ollama's clients show them.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.entrypoints.chat.formats.selection import AnswerFormat
from quire.entrypoints.ollama.protocol import (
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
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.text_form import TextForm
from quire.errors import ModelLoadError, ValidationError
from quire.model_cache.facts import numbers_by_type
from quire.models.gguf.model import is_gguf
from quire.models.weight_files import weight_files
from quire.pooling_params import EMBED

router = APIRouter()
STARTED = now()
FOREVER = "9999-12-31T23:59:59Z"
OLLAMA_VERSION = "0.12.0"  # Implemented version of Ollama's API; its clients reject older ones.


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


FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # Types of safetensors in which a number is a parameter.
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class FileFacts:
    """Facts about weight files.

    Args:
        size: bytes of all of them.
        digest: SHA-256 of their names, sizes and times, which changes whenever a file does; hashing the weights
            themselves would take minutes.
        modified_at: time of the last change, in Ollama's format; empty without files.
        parameter_size: number of parameters, such as "1.2B"; empty where packed integers hold them.
        main_type: type of most of the numbers.
    """

    size: int
    digest: str
    modified_at: str
    parameter_size: str
    main_type: str
    form: str


@functools.lru_cache(maxsize=4)
def facts_of_files(model_dir: str) -> FileFacts:
    """Return the facts about a model's weight files, read once; of a model without files, zeros."""
    path = Path(model_dir)
    form = "gguf" if is_gguf(path) else "safetensors"
    try:
        files = weight_files(path) if model_dir else []
        counts = numbers_by_type(path) if files else {}
    except ModelLoadError:  # dummy weights need no files
        files, counts = [], {}
    stats = [(file.name, file.stat()) for file in files]
    states = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    newest = max((stat.st_mtime for _, stat in stats), default=None)
    is_counted = form == "gguf" or FLOATS.issuperset(counts)
    return FileFacts(
        size=sum(stat.st_size for _, stat in stats),
        digest=hashlib.sha256(repr([model_dir, *states]).encode()).hexdigest(),
        modified_at="" if newest is None else _written(newest),
        parameter_size=_short(sum(counts.values())) if is_counted and counts else "",
        main_type=max(counts, key=lambda name: counts[name], default=""),
        form=form,
    )


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _short(number: int) -> str:
    """Return a number as Ollama writes it: 1.2B, 361.8M."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
