"""GET /api/tags, /api/ps and /api/version, POST /api/show: what is served, as Ollama's clients ask it."""

from __future__ import annotations

import hashlib

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.entrypoints.chat.formats.choice import AnswerFormat
from quire.entrypoints.ollama.protocol import (
    Details,
    ListedModel,
    ModelList,
    ShownModel,
    ShowRequest,
    Version,
)
from quire.entrypoints.ollama.writer import now
from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError
from quire.pooling_params import EMBED

router = APIRouter()
STARTED = now()
FOREVER = "9999-12-31T23:59:59Z"
SPOKEN_VERSION = "0.12.0"
"""The version of Ollama whose API this is; its clients refuse older ones."""


@router.get("/api/tags")
@describe(Operation(reply=ModelList))
async def tags(request: Request) -> Response:
    """The names under which the model is served."""
    server = server_of(request)
    return json_response(ModelList([_listed(server, name) for name in server.served_names]))


@router.get("/api/ps")
@describe(Operation(reply=ModelList))
async def loaded(request: Request) -> Response:
    """The same names: the model is loaded as long as the server runs."""
    server = server_of(request)
    models = [_listed(server, name) for name in server.served_names]
    for model in models:
        model.expires_at, model.size_vram = FOREVER, 0
        model.context_length = server.engine.config.model.max_model_len
    return json_response(ModelList(models))


@router.get("/api/version")
@describe(Operation(reply=Version))
async def version() -> Response:
    """Whose API this is, and who speaks it."""
    return json_response(Version(SPOKEN_VERSION, __version__))


@router.post("/api/show")
@describe(Operation(body=(ShowRequest,), reply=ShownModel, errors=(404,)))
async def show(request: Request) -> Response:
    """One of the names: its family, context, template and capabilities."""
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
    template, formats = _template(await server.form_named(name))
    can = _capabilities(server, formats)
    shown = ShownModel(f"FROM {name}", f"num_ctx {context}", template, _details(server), info, can, STARTED)
    return json_response(shown)


def served_name(server: ServerState, name: str) -> str:
    """The name of a model; in Ollama's names an absent tag is the tag "latest".

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
    """The chat template, and what of an answer is understood besides its text."""
    try:
        return form.chat_template.source, form.answer_format.formats
    except ValidationError:  # a model without one, or a server without a tokenizer
        return "", AnswerFormat()


def _listed(server: ServerState, name: str) -> ListedModel:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return ListedModel(name=name, model=name, modified_at=STARTED, digest=digest, details=_details(server))


def _details(server: ServerState) -> Details:
    config = server.engine.config
    family = config.arch.model_type
    return Details(family, [family], config.quantization.quantization or config.model.dtype)
