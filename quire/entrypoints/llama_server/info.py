# SPDX-License-Identifier: Apache-2.0
"""GET /props and /slots, POST /apply-template."""

from __future__ import annotations

from itertools import chain, islice

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.entrypoints.llama_server.answer import settings_of
from quire.entrypoints.llama_server.protocol import (
    AppliedTemplate,
    DefaultSettings,
    ModelModalities,
    Properties,
    ServerSlot,
    TemplateRequest,
)
from quire.entrypoints.openai.chat_prompt import rendered_chat
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.requests import ShownSequence
from quire.entrypoints.openai.sampling import MODEL_DEFAULTS
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import admin_router
from quire.errors import UnavailableError, ValidationError
from quire.sampling_params import SamplingParams

router = APIRouter()
template_router = APIRouter()
controls = admin_router()
SLOTS_QUERY = {"fail_on_no_slot": {"type": "string"}}


@router.get("/props")
@describe(Operation(reply=Properties))
async def props(request: Request) -> Response:
    """Show the served model: its context, default sampling parameters, chat template and kinds of input."""
    server = server_of(request)
    config, form = server.engine.config, server.form
    tokenizer = form.tokenizer if server.engine.tokenizer is not None else None
    kinds = server.media.input_modalities
    shown = Properties(
        default_generation_settings=DefaultSettings(config.model.max_model_len, _default_params(server)),
        total_slots=config.scheduler.max_num_seqs,
        model_alias=server.model_names[0],
        model_path=config.model.model,
        modalities=ModelModalities("image" in kinds, "audio" in kinds),
        chat_template=form.chat_template.source if form.has_chat else "",
        bos_token=(tokenizer.bos_token if tokenizer else None) or "",
        eos_token=(tokenizer.eos_token if tokenizer else None) or "",
        build_info=f"quire {__version__}",
        is_sleeping=server.engine.is_sleeping,
    )
    return json_response(shown)


def _default_params(server: ServerState) -> dict[str, object]:
    """Return the sampling parameters of a request that names none; none of a model that pools."""
    if server.engine.config.pooling is not None:
        return {}
    defaults = server.engine.input_processor.default_sampling_params
    own = {name: value for name, value in defaults.items() if name in MODEL_DEFAULTS}
    return settings_of(SamplingParams(**{**own, "max_tokens": None}))


@controls.get("/slots")
@describe(Operation(reply=list[ServerSlot], query=SLOTS_QUERY))
async def slots(request: Request) -> Response:
    """Show the sequences in flight as slots, and free ones up to --max-num-seqs.

    503 with `fail_on_no_slot`, if none is free.
    """
    server = server_of(request)
    for name in request.query_params:
        if name not in SLOTS_QUERY:
            raise ValidationError(f"this route has no option {name!r:.64}", param=name[:64])
    total = server.engine.config.scheduler.max_num_seqs
    requests = chain.from_iterable(await server.ask_all("list"))
    sequences = msgspec.convert([*islice(chain.from_iterable(requests), total)], list[ShownSequence])
    if len(sequences) >= total and request.query_params.get("fail_on_no_slot"):
        raise UnavailableError("no slot is free", retry_after=1)
    free = [None] * (total - len(sequences))
    return json_response([_slot(server, index, one) for index, one in enumerate([*sequences, *free])])


def _slot(server: ServerState, index: int, sequence: ShownSequence | None) -> ServerSlot:
    config = server.engine.config
    return ServerSlot(
        id=index,
        id_task=-1 if sequence is None else index,
        n_ctx=config.model.max_model_len,
        speculative=config.speculative.settings.method is not None,
        is_processing=sequence is not None,
        request_id="" if sequence is None else sequence.request_id,
        status="" if sequence is None else sequence.status,
    )


@template_router.post("/apply-template")
@describe(Operation(body=(TemplateRequest,), reply=AppliedTemplate, errors=(404,)))
async def apply_template(request: Request) -> Response:
    """Return the text of the prompt that a conversation makes."""
    server = server_of(request)
    server.engine.check_memory()
    body = await read_request(request, TemplateRequest)
    form = await server.form_named(server.check_model(body.model))
    rendered = await rendered_chat(server, form, body)
    return json_response(AppliedTemplate(rendered.chat.text))
