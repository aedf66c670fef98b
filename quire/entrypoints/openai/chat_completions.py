"""POST /v1/chat/completions

Invariant: the deltas of a stream join to the message of the same request without stream.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.chat.tool_parser import PlainParser
from quire.entrypoints.openai.chat_choice import ChatChoiceBuilder
from quire.entrypoints.openai.chat_prompt import chat_token_ids
from quire.entrypoints.openai.errors import request_id_of
from quire.entrypoints.openai.generation import Outputs
from quire.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs_json
from quire.entrypoints.openai.openapi import body_schema
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.prompts import with_options
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest
from quire.entrypoints.openai.protocol.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from quire.entrypoints.openai.respond import respond
from quire.entrypoints.openai.sampling import chat_params, note_max_tokens
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.stream_usage import StreamUsage
from quire.entrypoints.openai.streaming import frame
from quire.entrypoints.openai.tenant import tenant_of
from quire.entrypoints.openai.tool_choice import tool_constraint, tools_in_use
from quire.entrypoints.openai.usage import UsageMeter
from quire.entrypoints.openai.version import FINGERPRINT
from quire.inputs import TokensPrompt
from quire.outputs import CompletionOutput, RequestOutput

ROLE = "assistant"
router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_request(request, ChatCompletionRequest)
    answer_id = f"chatcmpl-{request_id_of(request.scope)}"
    answer = ChatAnswer(server_of(request), body, answer_id, tenant_of(request, body))
    return await respond(request, body, answer)


class ChatAnswer:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(
        self, server: ServerState, request: ChatCompletionRequest, answer_id: str, tenant: str
    ) -> None:
        self._server = server
        self._request = request
        self._id = answer_id
        self._tenant = tenant
        self._model = server.check_model(request.model)
        self._created = int(time.time())
        self._uses_tools = tools_in_use(server, request)
        self._choices: dict[int, ChatChoiceBuilder] = {}

    async def start(self) -> Outputs:
        engine, request = self._server.engine, self._request
        engine.check_admission()
        params = chat_params(request, engine.input_processor.default_sampling_params)
        constraint = tool_constraint(self._server, request, uses_tools=self._uses_tools)
        params = params.settled(structured_outputs=constraint)
        token_ids = await chat_token_ids(self._server, request, with_tools=self._uses_tools)
        prompt = with_options(TokensPrompt(prompt_token_ids=token_ids), request)
        note_max_tokens(request, params, [engine.input_processor.room(len(prompt["prompt_token_ids"]))])
        interval = engine.config.scheduler.stream_interval
        return Outputs(
            engine,
            [prompt],
            params,
            self._id,
            priority=request.priority,
            tenant=self._tenant,
            timeout_s=request.timeout,
            stream_interval=interval,
        )

    def whole(self, outputs: list[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        meter = UsageMeter()
        meter.add(0, output)
        by_index = sorted(output.outputs, key=lambda completion: completion.index)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(completion) for completion in by_index],
            system_fingerprint=FINGERPRINT,
            prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if self._request.return_token_ids else UNSET,
            **meter.closing(self._request.notes),
        )

    async def frames(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.chunks(outputs)) as chunks:
            async for chunk in chunks:
                yield frame(chunk)

    async def chunks(self, outputs: Outputs) -> AsyncGenerator[ChatChunk, None]:
        """The stream, before it is written: each choice's role, then its news step by step, then the usage."""
        force = self._server.config.enable_force_include_usage
        usage = StreamUsage(self._request, outputs.prompt_lengths, force=force)
        async with aclosing(outputs):
            async for _, output in outputs:
                for chunk in self.chunks_of(output, usage):
                    yield chunk
        if usage.wanted:
            yield self._chunk([], usage.closing())

    def chunks_of_whole(self, output: RequestOutput) -> Iterator[ChatChunk]:
        """The stream that a final output would have been in one piece, with usage."""
        usage = StreamUsage(self._request, [len(output.prompt_token_ids)], force=True)
        yield from self.chunks_of(output, usage)
        yield self._chunk([], usage.closing())

    def chunks_of(self, output: RequestOutput, usage: StreamUsage) -> Iterator[ChatChunk]:
        """What one output adds to the stream; the first one begins it."""
        usage.add(0, output)
        if not self._choices:
            for opening in self._openings():
                yield self._chunk([opening], usage.of_opening(), output.prompt_token_ids)
        for completion in output.outputs:
            *earlier, last = self._chunk_choices(completion)
            told = usage.of_chunk(0, completion)
            for choice in earlier:
                yield self._chunk([choice], usage.of_opening())
            yield self._chunk([last], told)

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        part = self._builder(completion).take(completion.text, completion.finish_reason)
        for call in part.tool_calls:
            call.index = UNSET
        message = ChatMessage(
            role=ROLE,
            content=None if part.tool_calls and not part.content else part.content,
            tool_calls=part.tool_calls or UNSET,
        )
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs(completion),
            finish_reason=part.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._request.return_token_ids else UNSET,
        )

    def _openings(self) -> list[ChatChunkChoice]:
        """Every choice's first chunk, which brings the role."""
        delta = ChatDelta(role=ROLE, content="")
        return [ChatChunkChoice(index=index, delta=delta) for index in range(self._request.n)]

    def _chunk_choices(self, completion: CompletionOutput) -> Iterator[ChatChunkChoice]:
        """The news of one step, also if they are no text yet: clients count chunks, and time them.

        There is another one for each text that comes after a call; the tokens go with the first.
        """
        parts = self._builder(completion).parts(completion.text, completion.finish_reason)
        for number, part in enumerate(parts):
            is_first = number == 0
            content = UNSET if part.tool_calls and not part.content else part.content
            yield ChatChunkChoice(
                index=completion.index,
                delta=ChatDelta(content=content, tool_calls=part.tool_calls or UNSET),
                logprobs=self._logprobs(completion) if is_first else None,
                finish_reason=part.finish_reason,
                stop_reason=completion.stop_reason if part.finish_reason else UNSET,
                token_ids=completion.token_ids if is_first and self._request.return_token_ids else UNSET,
            )

    def _chunk(
        self, choices: list[ChatChunkChoice], more: dict[str, Any], prompt_token_ids: list[int] | None = None
    ) -> ChatChunk:
        shown = prompt_token_ids if self._request.return_token_ids else None
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=FINGERPRINT,
            prompt_token_ids=UNSET if shown is None else shown,
            **more,
        )

    def _builder(self, completion: CompletionOutput) -> ChatChoiceBuilder:
        builder = self._choices.get(completion.index)
        if builder is None:
            builder = self._choices[completion.index] = self._new_builder()
        return builder

    def _new_builder(self) -> ChatChoiceBuilder:
        make_parser = self._server.make_tool_parser if self._uses_tools else None
        parser = make_parser() if make_parser is not None else PlainParser()
        return ChatChoiceBuilder(parser, None if self._request.parallel_tool_calls else 1)

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(completion.logprobs or [], self._request.top_logprobs or 0)
