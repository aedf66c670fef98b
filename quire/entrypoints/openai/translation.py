# SPDX-License-Identifier: Apache-2.0
"""Other APIs on top of chat completions.

Invariant: another API's request becomes a chat request under all of chat's rules, and its answer is made from chat's
chunks. A whole answer is made from a stream of one output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.queue_limits import QueueReservation
from quire.entrypoints.chat.formats.model import PromptEnd
from quire.entrypoints.openai.chat_completions import ChatAnswerWriter
from quire.entrypoints.openai.chat_prompt import RawTextPrompt, text_prompt
from quire.entrypoints.openai.generation import Outputs, StreamUsage
from quire.entrypoints.openai.notes import RequestNotes
from quire.entrypoints.openai.parsing import checked
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest, RequestModel
from quire.entrypoints.openai.protocol.responses import (
    ChatChunk,
    ChatChunkChoice,
    TokenLogprob,
    ToolCallMessage,
    Usage,
)
from quire.entrypoints.openai.sampling import chat_params, client_names
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.streaming import StreamFormat, respond
from quire.entrypoints.openai.tenant import apply_request_settings, tenant_of
from quire.entrypoints.openai.tool_choice import tool_constraint, tools_in_use
from quire.errors import ValidationError
from quire.outputs import RequestOutput, RequestStateStats

STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(frozen=True)
class AnswerDelta:
    """Increment of an answer. Each tool call has its index; pieces of one call concatenate their arguments.

    `is_open`, on the last piece: the reasoning or text had not ended.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallMessage] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_open: bool = False


class Writer(Protocol):
    """Writer of one answer in one API's form: `opening`, then `take` for each piece, then `closing`.

    Events are made lazily; each is encoded before the next one is requested.
    """

    @property
    def stream_format(self) -> StreamFormat: ...

    def encode(self, event: msgspec.Struct) -> bytes: ...

    def opening(self, usage: Usage) -> Iterable[msgspec.Struct]:
        """Return the events after the prompt is computed; `usage` counts it."""
        ...

    def take(self, piece: AnswerDelta) -> Iterable[msgspec.Struct]: ...

    def closing(self, last: ChatChunk, stats: RequestStateStats) -> Iterable[msgspec.Struct]:
        """Return the last events; chat's last chunk has usage, timings and notes."""
        ...

    def result(self) -> msgspec.Struct:
        """Return the whole answer, after `closing`."""
        ...


class TranslatedAnswer:
    """`Answer` that passes chat's chunks to a writer."""

    def __init__(self, chat: ChatAnswerWriter, writer: Writer) -> None:
        self._chat = chat
        self._writer = writer

    @property
    def num_sequences(self) -> int:
        return self._chat.num_sequences

    async def start(self, place: QueueReservation) -> Outputs:
        return await self._chat.start(place)

    def whole(self, outputs: list[RequestOutput]) -> msgspec.Struct:
        """Return the whole answer, from a stream of one output."""
        (output,) = outputs
        for chunk in self._chat.chunks_of_whole(output):
            deque(_events(self._chat, self._writer, chunk, output.metrics), maxlen=0)
        return self._writer.result()

    def frames(self, prompt_lengths: list[int]) -> TranslatedFrames:
        return TranslatedFrames(self._chat, self._chat.stream_usage(prompt_lengths), self._writer)


class TranslatedFrames:
    """Encoder of one streamed answer."""

    def __init__(self, chat: ChatAnswerWriter, usage: StreamUsage, writer: Writer) -> None:
        self._chat = chat
        self._usage = usage
        self._writer = writer
        self._stats = RequestStateStats()

    def encode(self, _: int, output: RequestOutput) -> bytes:
        self._stats = output.metrics
        return b"".join(map(self._encode_chunk, self._chat.chunks_of(output, self._usage)))

    def closing(self) -> bytes:
        return self._encode_chunk(self._chat.chunk([], self._usage.closing()))

    def _encode_chunk(self, chunk: ChatChunk) -> bytes:
        return b"".join(map(self._writer.encode, _events(self._chat, self._writer, chunk, self._stats)))


def _events(
    chat: ChatAnswerWriter, writer: Writer, chunk: ChatChunk, stats: RequestStateStats
) -> Iterable[msgspec.Struct]:
    """Return the events of one chat chunk: the first has the role, the last has no choices."""
    assert isinstance(chunk.usage, Usage)
    if not chunk.choices:
        return writer.closing(chunk, stats)
    (choice,) = chunk.choices
    if choice.delta.role is not UNSET:
        return writer.opening(chunk.usage)
    read = chat.choice(choice.index)
    return writer.take(_piece(choice, is_open=read is not None and read.is_open))


async def respond_translated(
    request: Request,
    fields: dict[str, Any],
    writer: Writer,
    answer_id: str,
    names: Mapping[str, str],
    text: RawTextPrompt | None = None,
) -> Response:
    """Answer the chat request with these fields, in the writer's form.

    Args:
        fields: as a client of chat completions would send them, with this client's `stream`.
        names: chat's field names -> those of this client.
        text: raw text to continue instead of the conversation.

    Raises:
        ClientError: as for chat, with the client's field names.
    """
    with renamed(names):
        chat = await as_chat(request, fields, names)
        answer = ChatAnswerWriter(server_of(request), chat, answer_id, tenant_of(request, chat), text)
        return await respond(request, chat, TranslatedAnswer(answer, writer), writer.stream_format)


async def check_translated(
    request: Request, fields: dict[str, Any], names: Mapping[str, str], text: RawTextPrompt | None = None
) -> None:
    """Check a request that needs no answer like `respond_translated`.

    Raises:
        ClientError: with the client's field names.
    """
    with renamed(names):
        chat, server = await as_chat(request, fields, names), server_of(request)
        apply_request_settings(request, chat)
        form = await server.form_named(server.check_model(chat.model))
        tool_constraint(form, chat, tools_in_use(server, form, chat), PromptEnd())
        if text is not None and text.suffix:
            await text_prompt(server, form, chat, text)
        processor = server.engine.input_processor
        with client_names(chat):
            params = chat_params(chat, processor.default_sampling_params)
            processor.process("", TokenizedPrompt([0], None), params)


async def as_chat(
    request: Request, fields: dict[str, Any], names: Mapping[str, str]
) -> ChatCompletionRequest:
    """Return the checked chat request; its notes join those of the client's request.

    Args:
        names: chat's field names -> those of this client.
    """
    notes: RequestNotes = request.scope["state"]["notes"]
    notes.names = names
    if fields.get("stream"):
        fields = {**fields, "stream_options": STREAM_OPTIONS}
    return await checked(request, fields, ChatCompletionRequest)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors from chat's names to those of `names`, in which `*` is any index."""
    try:
        yield
    except ValidationError as error:
        param = _renamed(error.param or "", names)
        if param == error.param or not error.param:
            raise
        raise type(error)(error.message.replace(error.param, param, 1), param=param) from None


def _renamed(path: str, names: Mapping[str, str]) -> str:
    """Replace the longest prefix of the path that has another name."""
    steps = path.split(".")
    for size in range(len(steps), 0, -1):
        begin = steps[:size]
        indices = [step for step in begin if step.isdigit()]
        if ".".join(begin) in names:
            return ".".join([names[".".join(begin)], *steps[size:]])
        name = names.get(".".join("*" if step.isdigit() else step for step in begin))
        if name is not None:
            for index in indices:
                name = name.replace("*", index, 1)
            return ".".join([name, *steps[size:]])
    return path


def note_ignored(body: RequestModel, names: Iterable[str]) -> None:
    """Note ignored fields besides those found while the body was parsed."""
    for name in names:
        body.notes.ignore(name)


def given(body: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the named fields that the client sent."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def as_object(arguments: str) -> msgspec.Raw:
    """Return a call's arguments as a JSON object on one line, with numbers as the model wrote them."""
    return msgspec.Raw(msgspec.json.format(arguments.encode() or b"{}", indent=-1))


def _piece(choice: ChatChunkChoice, *, is_open: bool) -> AnswerDelta:
    delta = choice.delta
    return AnswerDelta(
        content="" if delta.content is UNSET else delta.content,
        reasoning="" if delta.reasoning is UNSET else delta.reasoning,
        tool_calls=[call for call in delta.tool_calls or () if isinstance(call, ToolCallMessage)],
        logprobs=choice.logprobs.content if choice.logprobs else [],
        finish_reason=choice.finish_reason,
        stop_reason=None if choice.stop_reason is UNSET else choice.stop_reason,
        is_open=is_open,
    )
