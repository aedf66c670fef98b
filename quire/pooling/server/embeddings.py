# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings, /pooling and /classify"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.prompt_forms import TokenizedPrompt, parts_of
from quire.engine.tokenizer import INLINE_CHARS
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import checked, read_json
from quire.entrypoints.openai.prompts import split_prompts
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.errors import ValidationError
from quire.io_processors import IOProcessor
from quire.pooling.server.chat import read_either, run_chat
from quire.pooling.server.protocol import (
    MAX_INPUTS,
    Classification,
    ClassificationList,
    ClassifyChatRequest,
    ClassifyRequest,
    Embedding,
    EmbeddingChatRequest,
    EmbeddingList,
    EmbeddingRequest,
    PluginReply,
    PluginRequest,
    PooledChatFields,
    PooledData,
    PooledList,
    PoolingChatRequest,
    PoolingRequest,
    beside_numbers,
    encoded,
    reply_of,
)
from quire.pooling.server.run import (
    Pooled,
    PooledInputs,
    PoolingJob,
    embed_each,
    renamed_param,
    run_each,
    task_of,
    text_options,
    words_of,
)
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, PoolingParams

embedding_router = APIRouter()
pooling_router = APIRouter()
classify_router = APIRouter()


@embedding_router.post("/v1/embeddings")
@describe(
    Operation(
        (EmbeddingRequest, EmbeddingChatRequest), EmbeddingList, errors=(404, 504), headers=READ_HEADERS
    )
)
async def create_embeddings(request: Request) -> Response:
    """Return an embedding for each text, or for one conversation."""
    body = await read_either(request, await read_json(request), EmbeddingRequest, EmbeddingChatRequest)
    job = PoolingJob.of(request, body, "embd-")
    params = PoolingParams(use_activation=body.use_activation, dimensions=body.dimensions, task=EMBED)
    embedded = await _pooled(job, body, params)

    def made() -> EmbeddingList:
        data = [
            Embedding(index=index, embedding=encoded(vector, body.encoding_format))
            for index, vector in enumerate(embedded.numbers())
        ]
        return EmbeddingList(data=data, **job.head(embedded.pooled, embedded.media_tokens))

    return await reply_of(embedded.pooled, made)


@pooling_router.post("/pooling")
@describe(
    Operation(
        (PoolingRequest, PoolingChatRequest, PluginRequest),
        PooledList | PluginReply,
        errors=(404, 504),
        headers=READ_HEADERS,
    )
)
async def pool(request: Request) -> Response:
    """Return the pooled numbers of each text, conversation or token, or the IO processor's reply."""
    raw = await read_json(request)
    if raw.get("data") is not None:
        return await pool_with_plugin(request, await checked(request, raw, PluginRequest))
    body = await read_either(request, raw, PoolingRequest, PoolingChatRequest)
    job = PoolingJob.of(request, body, "pool-")
    found = await _pooled(job, body, _params(body, job))

    def made() -> PooledList:
        if body.lexical_weights:
            each = words_of(found.pooled, job.inputs.special_ids)
        else:
            each = (encoded(numbers, body.encoding_format) for numbers in found.numbers())
        data = [PooledData(index=index, data=one) for index, one in enumerate(each)]
        return PooledList(data=data, **job.head(found.pooled, found.media_tokens))

    return await reply_of(found.pooled, made)


async def _pooled(
    job: PoolingJob, body: EmbeddingRequest | PoolingRequest | PooledChatFields, params: PoolingParams
) -> PooledInputs:
    if isinstance(body, PooledChatFields):
        return await run_chat(job, body, params)
    inputs, options = split_prompts(body.input, "input", MAX_INPUTS), text_options(body)
    with renamed_param("input"):
        return await embed_each(job, inputs, options, params, in_windows=body.average_windows)


def _params(body: PoolingRequest | PoolingChatRequest, job: PoolingJob) -> PoolingParams:
    """Return the validated pooling parameters."""
    params = PoolingParams(
        body.use_activation,
        body.dimensions,
        body.step_tag_id,
        body.returned_token_ids,
        task_of(body, job.inputs.spec),
    )
    task = job.inputs.validated(params).task
    if body.encoding_format == "base64" and task in (TOKEN_EMBED, TOKEN_CLASSIFY):
        raise ValidationError(
            f"encoding_format base64 is for one row per input, and {task} has one row per token",
            param="encoding_format",
        )
    if body.average_windows and task != EMBED:
        raise ValidationError(
            f"average_windows is for embeddings, but the task is {task}", param="average_windows"
        )
    return params


async def pool_with_plugin(request: Request, body: PluginRequest) -> Response:
    """Answer a request in the form of the server's IO processor."""
    job = PoolingJob.of(request, body, "pool-")
    processor = job.server.io_processor
    if processor is None:
        raise ValidationError(
            "data needs an IO processor, and this server has none (--io-processor-plugin)", param="data"
        )
    params = await asyncio.to_thread(processor.params, body.data)
    with renamed_param("data"):
        pooled = await job.run(params, INLINE_CHARS + 1, lambda: _plugin_prompts(job, processor, body.data))
    reply = await asyncio.to_thread(processor.reply, body.data, pooled)
    data = await beside_numbers(pooled, lambda: msgspec.Raw(msgspec.json.encode(reply)))
    return json_response(PluginReply(data=data, **job.head(pooled)))


def _plugin_prompts(job: PoolingJob, processor: IOProcessor, data: Any) -> list[TokenizedPrompt]:
    return [job.inputs.tokenize(parts_of(prompt)) for prompt in processor.prompts(data)]


@classify_router.post("/classify")
@describe(
    Operation(
        (ClassifyRequest, ClassifyChatRequest), ClassificationList, errors=(404, 504), headers=READ_HEADERS
    )
)
async def classify(request: Request) -> Response:
    """Return the probability of each class, for each text or for one conversation."""
    body = await read_either(request, await read_json(request), ClassifyRequest, ClassifyChatRequest)
    job = PoolingJob.of(request, body, "classify-")
    params = PoolingParams(use_activation=body.use_activation, task=CLASSIFY)
    found = await _classified(job, body, params)

    def made() -> ClassificationList:
        labels = job.inputs.spec.labels
        data = [_classification(index, one, labels) for index, one in enumerate(found.pooled)]
        return ClassificationList(data=data, **job.head(found.pooled, found.media_tokens))

    return await reply_of(found.pooled, made)


async def _classified(
    job: PoolingJob, body: ClassifyRequest | ClassifyChatRequest, params: PoolingParams
) -> PooledInputs:
    if isinstance(body, ClassifyChatRequest):
        return await run_chat(job, body, params)
    inputs = split_prompts(body.input, "input", MAX_INPUTS)
    with renamed_param("input"):
        return PooledInputs(await run_each(job, inputs, text_options(body), params))


def _classification(index: int, one: Pooled, labels: tuple[str, ...]) -> Classification:
    probs = one.outputs.data
    # A single number is a score, which selects no class.
    label = labels[int(np.argmax(probs))] if len(labels) == len(probs) > 1 else None
    return Classification(index, label, probs.tolist(), len(probs))
