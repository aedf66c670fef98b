# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize and /detokenize"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.tokenizer import beside_loop
from quire.entrypoints.openai.chat_prompt import chat_prompt
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.field_rules import renamed_to
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import checked, read_json, read_request
from quire.entrypoints.openai.prompts import check_text
from quire.entrypoints.openai.protocol.requests import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeContentRequest,
    TokenizeRequest,
)
from quire.entrypoints.openai.protocol.responses import Detokenized, Tokenized, TokenizerInfo
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError

router = APIRouter()
info_router = APIRouter()  # For `--enable-tokenizer-info-endpoint`: the chat template may be confidential.


@router.post("/tokenize")
@describe(
    Operation(
        body=(TokenizeRequest, TokenizeChatRequest, TokenizeContentRequest), reply=Tokenized, errors=(404,)
    )
)
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, or of a conversation as the model would see it."""
    server = server_of(request)
    server.engine.check_memory()
    raw = await read_json(request)
    if raw.get("messages") is not None:
        chat = await checked(request, raw, TokenizeChatRequest)
        form = await server.form_named(server.check_model(chat.model))
        token_ids = (await chat_prompt(server, form, chat)).token_ids
        return await _tokenized(server, form, token_ids, chat.return_token_strs)
    if raw.get("prompt") is None and raw.get("content") is not None:
        return await _tokenized_content(server, await checked(request, raw, TokenizeContentRequest))
    body = await checked(request, raw, TokenizeRequest)
    form = await server.form_named(server.check_model(body.model))
    check_text(server, form, body.prompt, body)
    encode = form.tokenizer.encode
    token_ids = await beside_loop(
        len(body.prompt), encode, body.prompt, add_special_tokens=body.add_special_tokens
    )
    return await _tokenized(server, form, token_ids, body.return_token_strs)


@router.post("/detokenize")
@describe(Operation(body=(DetokenizeRequest,), reply=Detokenized, errors=(404,)))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    server = server_of(request)
    server.engine.check_memory()
    body = await read_request(request, DetokenizeRequest)
    form = await server.form_named(server.check_model(body.model))
    vocab_size = form.vocab_size
    for token_id in body.tokens:
        if token_id >= vocab_size:
            raise ValidationError(
                f"tokens has {token_id}, but token ids are integers in [0, {vocab_size - 1}]", param="tokens"
            )
    decode = form.tokenizer.decode
    text = await beside_loop(len(body.tokens), decode, body.tokens, skip_special_tokens=False)
    return json_response(Detokenized(text, text))


@info_router.get("/tokenizer_info")
@describe(Operation(reply=TokenizerInfo))
async def tokenizer_info(request: Request) -> Response:
    """Return what a client needs to build prompts itself."""
    server = server_of(request)
    tokenizer, config = server.form.tokenizer, server.engine.config
    return json_response(
        TokenizerInfo(
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            chat_template=server.form.chat_template.source if server.form.has_chat else None,
            special_tokens=sorted(tokenizer.special_tokens),
            vocab_size=config.arch.vocab_size,
            model_max_length=config.model.max_model_len,
        )
    )


async def _tokenized_content(server: ServerState, body: TokenizeContentRequest) -> Response:
    """Return the token ids of a text; unlike with `prompt`, none are added unless the client asks."""
    if body.with_pieces is not None:
        renamed_to("return_token_strs", False).check("with_pieces", body.with_pieces)
    form = await server.form_named(server.check_model(body.model))
    check_text(server, form, body.content, body)
    encode = partial(
        form.tokenizer.encode, add_special_tokens=body.add_special, allow_special=body.parse_special
    )
    token_ids = await beside_loop(len(body.content), encode, body.content)
    return await _tokenized(server, form, token_ids, body.return_token_strs)


async def _tokenized(server: ServerState, form: TextForm, token_ids: list[int], with_texts: bool) -> Response:
    texts = await beside_loop(len(token_ids), _texts, form, token_ids) if with_texts else None
    max_model_len = server.engine.config.model.max_model_len
    return json_response(Tokenized(len(token_ids), max_model_len, token_ids, texts))


def _texts(form: TextForm, token_ids: list[int]) -> list[str]:
    return list(map(form.tokenizer.token_text, token_ids))
