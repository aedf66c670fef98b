# SPDX-License-Identifier: Apache-2.0
"""Pooling of conversations, in which images, videos and sounds may stand: vLLM's `messages` in place of `input`."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request

from quire.engine.prompt_forms import TokenizedPrompt, parts_of
from quire.entrypoints.openai.chat_prompt import chat_prompt
from quire.entrypoints.openai.parsing import checked
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tenant import tenant_of
from quire.errors import ValidationError
from quire.pooling.server.protocol import PooledChatFields, PoolingFields, VectorFields
from quire.pooling.server.run import PooledInputs, PoolingJob
from quire.pooling_params import PoolingParams, TextOptions

Texts = TypeVar("Texts", bound=PoolingFields)
Chat = TypeVar("Chat", bound=PooledChatFields)


async def read_either(
    request: Request, raw: dict[str, Any], texts: type[Texts], chat: type[Chat]
) -> Texts | Chat:
    """Check a parsed body as that of texts, or with `messages` as that of a conversation.

    Raises:
        ClientError: as `parsing.read_request`; or it has both.
    """
    await server_of(request).find_adapter(raw.get("model") if isinstance(raw.get("model"), str) else None)
    if raw.get("messages") is None:
        return await checked(request, raw, texts)
    body = await checked(request, raw, chat)
    _check_alone(body)
    return body


def _check_alone(body: PooledChatFields) -> None:
    if body.input is not None:
        raise ValidationError("input and messages cannot be sent together; send one of them", param="input")
    if isinstance(body, VectorFields) and body.average_windows:
        raise ValidationError(
            "average_windows is for input; messages must fit the context", param="average_windows"
        )


async def run_chat(job: PoolingJob, body: PooledChatFields, params: PoolingParams) -> PooledInputs:
    """Return the pooled output of a conversation.

    Raises:
        QuireError: as `PoolingJob.run`, and if media are refused or the template rejects the conversation.
    """
    options = TextOptions(body.truncate_prompt_tokens, body.truncation_side)
    media_tokens: dict[str, int] = {}

    async def prepare() -> list[TokenizedPrompt]:
        # First: an embedder of texts that refuses an image may have no chat template either.
        job.server.media.without_media(body.messages, body.mm_processor_kwargs)
        form = await job.server.form_named(job.model)
        prompt = await chat_prompt(job.server, form, body, tenant=tenant_of(job.request, body))
        media_tokens.update(prompt.encoded.num_media_tokens)
        return [job.inputs.tokenize(parts_of(prompt.encoded.as_prompt()), options)]

    return PooledInputs(await job.run_prepared(params, prepare), media_tokens=media_tokens)
