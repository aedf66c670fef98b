# SPDX-License-Identifier: Apache-2.0
"""llama-server's POST /embedding: a route of an installation that pools."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.llama_server.protocol import ContentRequest
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.prompts import split_prompts
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.errors import ValidationError
from quire.pooling.server.protocol import MAX_INPUTS, Numbers, beside_numbers, encoded
from quire.pooling.server.run import PoolingJob, embed_each, renamed_param
from quire.pooling_params import EMBED, PoolingParams, TextOptions

router = APIRouter()
NORMALIZED, AS_IT_IS = 2, -1  # Values of `embd_normalize` that exist here.


class LlamaEmbedding(msgspec.Struct):
    index: int
    embedding: list[Numbers]


@router.post("/embedding")
@describe(Operation((ContentRequest,), list[LlamaEmbedding], errors=(404, 504), headers=READ_HEADERS))
async def embedding(request: Request) -> Response:
    """Return the embedding of each text or list of token ids."""
    body = await read_request(request, ContentRequest)
    normalizes = body.embd_normalize
    if normalizes not in (None, NORMALIZED, AS_IT_IS):
        raise ValidationError(
            f"embd_normalize must be {NORMALIZED} (Euclidean norm) or {AS_IT_IS} (none), got {normalizes}",
            param="embd_normalize",
        )
    inputs = split_prompts(body.content, "content", MAX_INPUTS)
    job = PoolingJob.of(request, body, "embd-")
    params = PoolingParams(
        task=EMBED, use_activation=None if normalizes is None else normalizes == NORMALIZED
    )
    with renamed_param("content"):
        found = await embed_each(job, inputs, TextOptions(), job.inputs.validated(params), in_windows=False)

    def made() -> Response:
        rows = [
            LlamaEmbedding(index, [encoded(numbers, "float")])
            for index, numbers in enumerate(found.numbers())
        ]
        return json_response(rows)

    return await beside_numbers(found.pooled, made)
