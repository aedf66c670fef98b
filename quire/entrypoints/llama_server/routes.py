# SPDX-License-Identifier: Apache-2.0
"""POST /completion, /infill, /apply-template and /embedding, GET /props and /slots.

/tokenize and /detokenize are vLLM's; `content` in place of `prompt` is read there as well.
"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.tokenizer import beside_loop
from quire.entrypoints.llama_server import info
from quire.entrypoints.llama_server.answer import FORMAT, LlamaAnswer
from quire.entrypoints.llama_server.fields import (
    NAMES,
    Fields,
    completion_fields,
    extras_of,
    infill_prompt,
    limit_of,
    prompts_of,
    texts_of,
)
from quire.entrypoints.llama_server.protocol import (
    GeneratingRequest,
    InfillRequest,
    LlamaCompletion,
    PromptRequest,
)
from quire.entrypoints.openai.completions import CompletionAnswer
from quire.entrypoints.openai.errors import own_id_of
from quire.entrypoints.openai.families import (
    EndpointFamily,
    ServerFeature,
    by_embedding,
    by_generation,
    families_with,
)
from quire.entrypoints.openai.openapi.operation import Operation, describe, events_without_end
from quire.entrypoints.openai.parsing import checked, read_request
from quire.entrypoints.openai.prompts import check_text
from quire.entrypoints.openai.protocol.requests import CompletionRequest
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.streaming import respond
from quire.entrypoints.openai.tenant import READ_HEADERS, tenant_of
from quire.entrypoints.openai.translation import renamed

router = APIRouter()


@router.post("/completion")
@describe(
    Operation(
        body=(PromptRequest,),
        reply=LlamaCompletion | list[LlamaCompletion],
        stream=events_without_end(LlamaCompletion),
        errors=(404, 504),
        headers=READ_HEADERS,
    )
)
async def completion(request: Request) -> Response:
    """Complete one or several prompts; several make a list of replies."""
    body = await read_request(request, PromptRequest)
    server = server_of(request)
    form = await server.form_named(server.check_model(body.model))
    text = texts_of(body.prompt)
    check_text(server, form, text, body)
    prompts = await beside_loop(len(text), prompts_of, body.prompt, form.tokenizer)
    fields = completion_fields(body, form.tokenizer, form.vocab_size)
    return await _respond(request, body, {**fields, "prompt": prompts})


@router.post("/infill")
@describe(
    Operation(
        body=(InfillRequest,),
        reply=LlamaCompletion,
        stream=events_without_end(LlamaCompletion),
        errors=(404, 504),
        headers=READ_HEADERS,
    )
)
async def infill(request: Request) -> Response:
    """Fill in the text between a prefix and a suffix, of a model that was made for it."""
    body = await read_request(request, InfillRequest)
    server = server_of(request)
    form = await server.form_named(server.check_model(body.model))
    with renamed({"suffix": "input_suffix"}):
        fill_in = form.fill_in
    extra = "".join(text for _, text in extras_of(body))
    text = extra + body.input_prefix + body.input_suffix + body.prompt
    check_text(server, form, text, body)
    ids = await beside_loop(len(text), partial(infill_prompt, body, fill_in, form.tokenizer))
    fields = completion_fields(body, form.tokenizer, form.vocab_size)
    return await _respond(
        request, body, {**fields, "prompt": [ids], "stop_token_ids": fill_in.end_ids or None}
    )


async def _respond(request: Request, body: GeneratingRequest, fields: Fields) -> Response:
    """Answer the completion request with these fields in llama-server's form."""
    server = server_of(request)
    body.notes.names = names = NAMES if body.max_tokens is None else {"logprobs": "n_probs"}
    with renamed(names):
        translated = await checked(request, fields, CompletionRequest)
        answer_id = f"cmpl-{own_id_of(request.scope)}"
        tenant = tenant_of(request, translated)
        inner = CompletionAnswer(server, translated, answer_id, tenant, default_max_tokens=None)
        answer = LlamaAnswer(server, body, inner, is_silent=limit_of(body) == 0)
        return await respond(request, translated, answer, FORMAT)


FEATURE = ServerFeature(
    families=(
        EndpointFamily(router, by_generation),
        EndpointFamily(info.template_router, by_generation),
        *families_with("pooling", "quire.entrypoints.llama_server.embedding:router", by_embedding),
        EndpointFamily(info.router),
    ),
    controls=(info.controls,),
)
