# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses, and its answers, whole and as events.

Invariant: a stream's events build the same response as the request without stream; they are numbered from 0 without
gaps. One item is open at a time, and its deltas concatenate to the item of the whole response. The last event is
`response.completed`, `.incomplete` or `.failed`, with all that was written. No response is stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.chat.call_arguments import custom_input
from quire.entrypoints.openai.errors import body_of, own_id_of, status_of
from quire.entrypoints.openai.families import EndpointFamily, ServerFeature, by_generation
from quire.entrypoints.openai.openapi.operation import Operation, describe, named_events
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.responses import ChatChunk, TokenLogprob, ToolCallMessage, Usage
from quire.entrypoints.openai.responses.conversation import CHAT_NAMES, chat_fields, idle_includes
from quire.entrypoints.openai.responses.protocol import (
    WITHOUT_EFFECT,
    AnyEvent,
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    Completed,
    Created,
    CustomCallItem,
    CustomInputDelta,
    EndedIncomplete,
    Failed,
    Incomplete,
    InProgress,
    InputDetails,
    InputDone,
    Item,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputDetails,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    Problem,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from quire.entrypoints.openai.responses.tools import ResponseTools
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.streaming import COMMENT, StreamFormat
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.entrypoints.openai.translation import AnswerDelta, given, note_ignored, respond_translated
from quire.outputs import RequestStateStats

# Finish reason -> reason of an incomplete response.
INCOMPLETE = {"length": "max_output_tokens", "timeout": "timeout"}


class ResponseWriter:
    """Writer of one response."""

    def __init__(self, response_id: str, model: str, request: ResponsesRequest, tools: ResponseTools) -> None:
        self._response = _opened(response_id, model, request)
        self._tools = tools
        self._num_events = 0
        self._pieces: list[str] = []  # pieces of the open item
        self._is_open = False
        # Logprobs of tokens without text so far: markers, or the first tokens of a text.
        self._held_logprobs: list[TokenLogprob] = []
        self._call_index = -1

    @cached_property
    def stream_format(self) -> StreamFormat:
        return StreamFormat("text/event-stream", self._failure, ping=COMMENT)

    def encode(self, event: msgspec.Struct) -> bytes:
        numbered = replace(event, sequence_number=self._num_events)
        self._num_events += 1
        name = str(event.__struct_config__.tag).encode()
        return b"event: " + name + b"\ndata: " + msgspec.json.encode(numbered) + b"\n\n"

    def opening(self, usage: Usage) -> Iterator[msgspec.Struct]:
        yield Created(response=self._response)
        yield InProgress(response=self._response)

    def take(self, piece: AnswerDelta) -> Iterator[msgspec.Struct]:
        if piece.reasoning:
            self._held_logprobs = []
            yield from self._reasoning(piece.reasoning)
        if piece.content or (piece.logprobs and self._is_in_text):
            yield from self._text(piece)
        elif not piece.reasoning:
            self._held_logprobs += piece.logprobs
        for call in piece.tool_calls:
            yield from self._call(call)
        if piece.finish_reason is not None:
            yield from self._end(piece)

    def closing(self, last: ChatChunk, stats: RequestStateStats) -> Iterator[msgspec.Struct]:
        assert isinstance(last.usage, Usage)
        response, usage = self._response, last.usage
        response.timings, response.ignored, response.adjusted = last.timings, last.ignored, last.adjusted
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            output_tokens_details=OutputDetails(usage.reasoning_tokens),
        )
        ended = Completed if response.status == "completed" else EndedIncomplete
        yield ended(response=response)

    def result(self) -> ResponseObject:
        return self._response

    @property
    def _index(self) -> int:
        return len(self._response.output) - 1

    @property
    def _is_in_text(self) -> bool:
        return self._is_open and isinstance(self._response.output[-1], MessageItem)

    def _reasoning(self, text: str) -> Iterator[msgspec.Struct]:
        item = self._response.output[-1] if self._is_open else None
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(self._new_id("rs"), "in_progress")
            yield from self._open(item)
            item.content.append(ReasoningText())
            yield PartAdded(item_id=item.id, output_index=self._index, part=ReasoningText())
        self._pieces.append(text)
        yield ReasoningDelta(item_id=item.id, output_index=self._index, delta=text)

    def _text(self, piece: AnswerDelta) -> Iterator[msgspec.Struct]:
        item = self._response.output[-1] if self._is_open else None
        if not isinstance(item, MessageItem):
            item = MessageItem(self._new_id("msg"), "in_progress")
            yield from self._open(item)
            item.content.append(OutputText())
            yield PartAdded(item_id=item.id, output_index=self._index, part=OutputText())
        self._pieces.append(piece.content)
        logprobs, self._held_logprobs = self._held_logprobs + piece.logprobs, []
        item.content[0].logprobs += logprobs
        yield OutputTextDelta(
            item_id=item.id, output_index=self._index, delta=piece.content, logprobs=logprobs
        )

    def _call(self, call: ToolCallMessage) -> Iterator[msgspec.Struct]:
        assert isinstance(call.index, int)
        if call.index != self._call_index:
            self._call_index = call.index
            yield from self._open(self._call_item(call))
        self._pieces.append(call.function.arguments)
        item = self._response.output[-1]
        if isinstance(item, CallItem):  # a custom tool's input is known only once its arguments are complete
            yield ArgumentsDelta(item_id=item.id, output_index=self._index, delta=call.function.arguments)

    def _call_item(self, call: ToolCallMessage) -> CallItem | CustomCallItem:
        tool = self._tools.called(call.function.name)
        namespace = UNSET if tool.namespace is None else tool.namespace
        if tool.is_custom:
            return CustomCallItem(f"ctc_{call.id}", "in_progress", call.id, tool.name, namespace=namespace)
        return CallItem(f"fc_{call.id}", "in_progress", call.id, tool.name, namespace=namespace)

    def _open(self, item: Item) -> Iterator[msgspec.Struct]:
        yield from self._close("completed")
        self._response.output.append(item)
        self._is_open = True
        yield ItemAdded(output_index=self._index, item=item)

    def _close(self, status: str) -> Iterator[msgspec.Struct]:
        """Close the open item, which is now complete."""
        if not self._is_open:
            return
        item, whole = self._response.output[-1], "".join(self._pieces)
        item.status, self._pieces, self._is_open = status, [], False
        if isinstance(item, CallItem):
            item.arguments = whole
            yield ArgumentsDone(item_id=item.id, output_index=self._index, name=item.name, arguments=whole)
        elif isinstance(item, CustomCallItem):
            item.input = custom_input(whole)
            yield CustomInputDelta(item_id=item.id, output_index=self._index, delta=item.input)
            yield InputDone(item_id=item.id, output_index=self._index, input=item.input)
        elif isinstance(item, ReasoningItem):
            (thought,) = item.content
            thought.text = whole
            yield ReasoningDone(item_id=item.id, output_index=self._index, text=whole)
            yield PartDone(item_id=item.id, output_index=self._index, part=thought)
        else:
            (part,) = item.content
            part.text = whole
            yield OutputTextDone(
                item_id=item.id, output_index=self._index, text=whole, logprobs=part.logprobs
            )
            yield PartDone(item_id=item.id, output_index=self._index, part=part)
        yield ItemDone(output_index=self._index, item=item)

    def _end(self, last: AnswerDelta) -> Iterator[msgspec.Struct]:
        """Complete the response. A finished answer without text gets an empty message; a truncated one keeps its
        content.
        """
        reason = INCOMPLETE.get(last.finish_reason or "")
        is_whole = reason is None and last.stop_reason is None
        if is_whole and all(isinstance(item, ReasoningItem) for item in self._response.output):
            yield from self._text(AnswerDelta())
        self._response.status = "completed" if reason is None else "incomplete"
        is_cut = reason is not None and last.is_open
        yield from self._close("incomplete" if is_cut else "completed")
        if reason is not None:
            self._response.incomplete_details = Incomplete(reason)

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._response.id.removeprefix('resp_')}_{len(self._response.output)}"

    def _failure(self, error: BaseException, request_id: str) -> bytes:
        sentence = body_of(error, request_id).error.message
        code = "server_error" if status_of(error) >= 500 else "invalid_prompt"
        self._response.status, self._response.error = "failed", Problem(code, sentence)
        events = [*self._close("incomplete"), Failed(response=self._response)]
        return b"".join(map(self.encode, events))


def _opened(response_id: str, model: str, request: ResponsesRequest) -> ResponseObject:
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning={"effort": None, "summary": None},
        temperature=request.temperature,
        text=request.text or {"format": {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_p=request.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )


router = APIRouter()


@router.post("/v1/responses")
@describe(
    Operation(
        body=(ResponsesRequest,),
        reply=ResponseObject,
        stream=named_events(AnyEvent),
        errors=(404, 504),
        headers=READ_HEADERS,
    )
)
async def create_response(request: Request) -> Response:
    """Answer an input."""
    body = await read_request(request, ResponsesRequest)
    note_ignored(body, [*given(body, WITHOUT_EFFECT), *idle_includes(body)])
    response_id = f"resp_{own_id_of(request.scope)}"
    model = server_of(request).check_model(body.model)
    tools = ResponseTools(body.tools or [], body.notes)
    writer = ResponseWriter(response_id, model, body, tools)
    fields, names = {**chat_fields(body, tools), "model": model}, {**CHAT_NAMES, **tools.chat_names}
    return await respond_translated(request, fields, writer, response_id, names)


FEATURE = ServerFeature(families=(EndpointFamily(router, by_generation),))
