# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions

Invariant: the deltas of a stream concatenate to the message of the same request without stream. Both go through
`ChatChoiceBuilder`, which parses a choice's text into reasoning, content and tool calls. `ChatFrames` encodes the
stream; its cached encoding of text chunks gives the same bytes as encoding the chunks themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.queue_limits import QueueReservation
from quire.entrypoints.chat.call_arguments import custom_input, new_call_id
from quire.entrypoints.chat.formats.answer import AnswerReader
from quire.entrypoints.chat.formats.model import PromptEnd
from quire.entrypoints.chat.formats.reasoning import ReasoningCounter
from quire.entrypoints.chat.formats.scanning import Event, Reasoning, ToolCall, Tools
from quire.entrypoints.chat.media import EncodedChat
from quire.entrypoints.openai.chat_prompt import (
    RawTextPrompt,
    chat_prompt,
    function_call,
    old_names,
    text_prompt,
    translate,
)
from quire.entrypoints.openai.errors import own_id_of
from quire.entrypoints.openai.generation import Outputs, StreamUsage, UsageMeter
from quire.entrypoints.openai.logprobs import chat_logprobs, naming_of, prompt_logprobs_json
from quire.entrypoints.openai.openapi.operation import Operation, data_events, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.prompts import MAX_SEQUENCES, with_options
from quire.entrypoints.openai.protocol.requests import ChatCompletionRequest
from quire.entrypoints.openai.protocol.responses import (
    AnyToolCall,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CustomCall,
    CustomToolCall,
    FunctionCall,
    ToolCallMessage,
)
from quire.entrypoints.openai.sampling import chat_params, note_max_tokens, search_params
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.streaming import TextFrame, frame, respond
from quire.entrypoints.openai.tenant import READ_HEADERS, tenant_of
from quire.entrypoints.openai.tool_choice import constrained, tool_constraint, tools_in_use
from quire.errors import ValidationError
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams

ROLE = "assistant"


@dataclass
class ChoicePart:
    """Result of parsing one piece of text: reasoning, then content, then tool calls."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallMessage] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def place(self) -> int:
        """Rank of the last kind present: 0 reasoning, 1 content, 2 tool calls."""
        return 2 if self.tool_calls else 1 if self.content else 0


class ChatChoiceBuilder:
    """Incremental parser of one choice; assigns indices and ids to its tool calls.

    Args:
        counter: counts reasoning tokens, if the model reasons.
        shows_reasoning: if False, reasoning is parsed and dropped.
        max_calls: further calls are dropped (`parallel_tool_calls: false` allows one).
    """

    def __init__(
        self,
        reader: AnswerReader,
        counter: ReasoningCounter | None = None,
        *,
        shows_reasoning: bool = True,
        max_calls: int | None = None,
    ) -> None:
        self._reader = reader
        self._counter = counter
        self.shows_reasoning = shows_reasoning
        self._max_calls = max_calls
        self._call_ids: set[str] = set()

    @property
    def num_reasoning_tokens(self) -> int:
        return self._counter.num_tokens if self._counter is not None else 0

    @property
    def is_open(self) -> bool:
        """True while the latest reasoning or text has not ended."""
        return self._reader.is_open

    def take(
        self, text: str, token_ids: Sequence[int], finish_reason: str | None, *, was_cut: bool = False
    ) -> ChoicePart:
        """Parse the next piece of text into one part. A finish reason marks the last piece, which may have been cut."""
        parts = self.parts(text, token_ids, finish_reason, was_cut=was_cut)
        return ChoicePart(
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            [call for part in parts for call in part.tool_calls],
            parts[-1].finish_reason,
        )

    def parts(
        self, text: str, token_ids: Sequence[int], finish_reason: str | None, *, was_cut: bool = False
    ) -> list[ChoicePart]:
        """Parse like `take`, but keep the model's order: a list of parts, each reasoning, content, calls.
        Never empty."""
        return self.arranged(self.read(text, token_ids, finish_reason, was_cut=was_cut), finish_reason)

    def read(
        self, text: str, token_ids: Sequence[int], finish_reason: str | None = None, *, was_cut: bool = False
    ) -> list[Event]:
        """Parse the next piece of text into events, for `arranged`."""
        found = self._reader.feed(text)
        if finish_reason is not None:
            found += self._reader.finish(was_cut=was_cut)
        if self._counter is not None:
            self._counter.add(token_ids)
            self._counter.resolve(self._reader.call_markers)
        return found

    def arranged(self, found: list[Event], finish_reason: str | None = None) -> list[ChoicePart]:
        """Group events into parts."""
        parts = [ChoicePart()]
        for event in found:
            self._add(event, parts)
        ends_in_calls = finish_reason == "stop" and self._call_ids
        parts[-1].finish_reason = "tool_calls" if ends_in_calls else finish_reason
        return parts

    def _add(self, event: Event, parts: list[ChoicePart]) -> None:
        place = 2 if isinstance(event, ToolCall) else 0 if isinstance(event, Reasoning) else 1
        if place < parts[-1].place:
            parts.append(ChoicePart())
        if isinstance(event, ToolCall):
            self._add_call(event, parts[-1])
        elif isinstance(event, Reasoning):
            parts[-1].reasoning += event.text if self.shows_reasoning else ""
        else:
            parts[-1].content += event

    def _add_call(self, call: ToolCall, part: ChoicePart) -> None:
        if self._max_calls is not None and len(self._call_ids) >= self._max_calls:
            return
        call_id = call.id
        if call_id is None or call_id in self._call_ids:
            call_id = new_call_id()
        function = FunctionCall(call.name, call.arguments)
        part.tool_calls.append(ToolCallMessage(index=len(self._call_ids), id=call_id, function=function))
        self._call_ids.add(call_id)


class ChunkSource(Protocol):
    """Source of an answer's chunks."""

    def chunks_of(self, output: RequestOutput, usage: StreamUsage) -> Iterator[ChatChunk]: ...

    def chunks_of_piece(
        self, completion: CompletionOutput, found: list[Event], more: dict[str, Any]
    ) -> Iterator[ChatChunk]: ...

    def chunk(self, choices: list[ChatChunkChoice], more: dict[str, Any]) -> ChatChunk: ...

    def choice(self, index: int) -> ChatChoiceBuilder | None: ...


class ChatFrames:
    """Encoder of one streamed answer.

    Nearly every output is a piece of one choice's text or reasoning, and such chunks differ in that text alone. They
    are encoded once, with a placeholder, unless `shows_tokens` adds per-token fields.
    """

    def __init__(self, answer: ChunkSource, usage: StreamUsage, *, shows_tokens: bool) -> None:
        self._answer = answer
        self._usage = usage
        self._has_uniform_chunks = usage.has_uniform_chunks and not shows_tokens
        self._text_frames: dict[tuple[int, bool], TextFrame] = {}

    def encode(self, _: int, output: RequestOutput) -> bytes:
        if self._has_uniform_chunks and len(output.outputs) == 1:
            (completion,) = output.outputs
            choice = self._answer.choice(completion.index)
            if choice is not None and completion.finish_reason is None:
                return self._encode_piece(completion, choice)
        return b"".join(map(frame, self._answer.chunks_of(output, self._usage)))

    def closing(self) -> bytes:
        return frame(self._answer.chunk([], self._usage.closing())) if self._usage.wanted else b""

    def _encode_piece(self, completion: CompletionOutput, choice: ChatChoiceBuilder) -> bytes:
        self._usage.count_only(0, completion)
        found = choice.read(completion.text, completion.token_ids)
        event = found[0] if len(found) == 1 else None if found else ""
        if isinstance(event, str):
            return self._text_frame(completion, is_reasoning=False).with_text(event)
        if isinstance(event, Reasoning) and choice.shows_reasoning:
            return self._text_frame(completion, is_reasoning=True).with_text(event.text)
        more = self._usage.opening_fields()
        return b"".join(map(frame, self._answer.chunks_of_piece(completion, found, more)))

    def _text_frame(self, completion: CompletionOutput, *, is_reasoning: bool) -> TextFrame:
        known = self._text_frames.get((completion.index, is_reasoning))
        if known is None:
            mark = TextFrame.MARK
            found: list[Event] = [Reasoning(mark) if is_reasoning else mark]
            (chunk,) = self._answer.chunks_of_piece(completion, found, self._usage.opening_fields())
            known = self._text_frames[completion.index, is_reasoning] = TextFrame(chunk)
        return known


router = APIRouter()


@router.post("/v1/chat/completions")
@describe(
    Operation(
        body=(ChatCompletionRequest,),
        reply=ChatCompletion,
        stream=data_events(ChatChunk),
        errors=(404, 504),
        headers=READ_HEADERS,
    )
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_request(request, ChatCompletionRequest)
    answer_id = f"chatcmpl-{own_id_of(request.scope)}"
    translate(body)
    with old_names(body):
        answer = ChatAnswerWriter(server_of(request), body, answer_id, tenant_of(request, body))
        return await respond(request, body, answer)


class ChatAnswerWriter:
    """Response writer of one chat request, whole or streamed.

    Args:
        text: raw text to continue instead of the request's conversation; its answer is parsed as plain text.
    """

    def __init__(
        self,
        server: ServerState,
        request: ChatCompletionRequest,
        answer_id: str,
        tenant: str,
        text: RawTextPrompt | None = None,
    ) -> None:
        self._server = server
        self._request = request
        self._id = answer_id
        self._tenant = tenant
        self._text = text
        self._model = server.check_model(request.model)
        self._adapter = server.adapters.get(self._model)  # looked up now: it may be unloaded at any time
        self._created = int(time.time())
        self._form = server.form
        self._tools: Tools | None = None
        self._begin = PromptEnd()
        self._encoded = EncodedChat([])  # Keeps files of images as long as this answer.
        self._choices: dict[int, ChatChoiceBuilder] = {}
        self._texts: dict[int, str] = {}  # Of choices that are parsed at their ends.

    @property
    def num_sequences(self) -> int:
        return max(1, min(self._request.n, MAX_SEQUENCES))

    async def start(self, place: QueueReservation) -> Outputs:
        engine, request = self._server.engine, self._request
        form = await self._server.form_of(self._adapter)
        self._form = form if self._text is None else form.as_text
        if self._text is not None and self._text.suffix and (ends := form.fill_in.end_ids):
            request.stop_token_ids = [*(request.stop_token_ids or ()), *ends]
        self._tools = tools_in_use(self._server, self._form, request)
        room, answers = engine.config.model.max_model_len, self._form.answer_format
        params = search_params(request, room, answers.shown_ids) or chat_params(
            request, engine.input_processor.default_sampling_params
        )
        if self._text is None:
            chat = await chat_prompt(
                self._server, form, request, with_tools=self._tools is not None, tenant=self._tenant
            )
        else:
            chat = await text_prompt(self._server, form, request, self._text)
        self._begin, self._encoded = chat.end, chat.encoded
        if isinstance(params, SamplingParams):
            params = answers.with_format_options(params, chat.end)
            params = await constrained(self._server, self._form, request, self._tools, chat, params)
        elif tool_constraint(self._form, request, self._tools, chat.end) is not None:
            raise ValidationError(
                "beam search does not support structured output or required tool calls",
                param="use_beam_search",
            )
        prompt = with_options(chat.encoded.as_prompt(), request)
        note_max_tokens(request, params, [engine.input_processor.room(len(prompt["prompt_token_ids"]))])
        interval = engine.config.scheduler.stream_interval
        return Outputs(
            engine,
            [prompt],
            params,
            self._id,
            priority=request.priority,
            tenant=self._tenant,
            adapter_request=self._adapter,
            timeout_s=request.time_left(),
            trace_headers=request.trace_headers,
            data_parallel_rank=request.replica,
            stream_interval=interval,
            place=place,
        )

    def whole(self, outputs: list[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        meter = UsageMeter(media_tokens=self._encoded.num_media_tokens)
        meter.add(0, output)
        by_index = sorted(output.outputs, key=lambda completion: completion.index)
        choices = [self._choice(completion) for completion in by_index]
        meter.reasoning_tokens = self._reasoning_tokens
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if self._request.return_token_ids else UNSET,
            **meter.closing(self._request.notes),
        )

    def frames(self, prompt_lengths: list[int]) -> ChatFrames:
        request = self._request
        shows_tokens = bool(request.logprobs or request.return_token_ids or self._encoded.parse)
        return ChatFrames(self, self.stream_usage(prompt_lengths), shows_tokens=shows_tokens)

    def stream_usage(self, prompt_lengths: list[int]) -> StreamUsage:
        """Return the usage counter for a stream's chunks."""
        force = self._server.config.enable_force_include_usage
        media_tokens = self._encoded.num_media_tokens
        return StreamUsage(self._request, prompt_lengths, force=force, media_tokens=media_tokens)

    def choice(self, index: int) -> ChatChoiceBuilder | None:
        """Return the parser of a choice; None before its first output."""
        return self._choices.get(index)

    def chunks_of_whole(self, output: RequestOutput) -> Iterator[ChatChunk]:
        """Yield the chunks of a stream whose only output is this final one, with usage."""
        media_tokens = self._encoded.num_media_tokens
        lengths = [len(output.prompt_token_ids)]
        usage = StreamUsage(self._request, lengths, force=True, media_tokens=media_tokens)
        yield from self.chunks_of(output, usage)
        yield self.chunk([], usage.closing())

    def chunks_of(self, output: RequestOutput, usage: StreamUsage) -> Iterator[ChatChunk]:
        """Yield the chunks of one output; the first output also opens the stream."""
        usage.add(0, output)
        if not self._choices:
            for opening in self._openings():
                yield self.chunk([opening], usage.opening_fields(), output.prompt_token_ids)
        for completion in output.outputs:
            builder, reason = self._builder(completion), completion.finish_reason
            found = builder.read(completion.text, completion.token_ids, reason, was_cut=completion.was_cut)
            usage.note_reasoning(self._reasoning_tokens)
            *earlier, last = self._chunk_choices(completion, builder.arranged(found, reason))
            last.task_answer = self._task_answer(completion)
            usage_fields = usage.chunk_fields(0, completion)
            for choice in earlier:
                yield self.chunk([choice], usage.opening_fields())
            yield self.chunk([last], usage_fields)

    def chunks_of_piece(
        self, completion: CompletionOutput, found: list[Event], more: dict[str, Any]
    ) -> Iterator[ChatChunk]:
        """Yield the chunks of a piece that neither opens nor ends a choice, parsed as `found`; each has the fields
        `more`.
        """
        for choice in self._chunk_choices(completion, self._builder(completion).arranged(found)):
            yield self.chunk([choice], more)

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        part = self._builder(completion).take(
            completion.text, completion.token_ids, completion.finish_reason, was_cut=completion.was_cut
        )
        for call in part.tool_calls:
            call.index = UNSET
        message = ChatMessage(
            role=ROLE,
            content=None if part.tool_calls and not part.content else part.content,
            reasoning=part.reasoning or UNSET,
            reasoning_content=part.reasoning or UNSET,
            **self._calls(part),
        )
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs(completion),
            finish_reason=self._finish_reason(part),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._request.return_token_ids else UNSET,
            task_answer=self._task_answer(completion),
        )

    def _task_answer(self, completion: CompletionOutput) -> dict[str, Any] | UnsetType:
        """Add a piece of text, and return the parsed answer if it is the last one of its choice."""
        if self._encoded.parse is None:
            return UNSET
        text = self._texts.get(completion.index, "") + completion.text
        self._texts[completion.index] = text
        return UNSET if completion.finish_reason is None else self._encoded.parse(text)

    def _openings(self) -> list[ChatChunkChoice]:
        """Return the first chunk of every choice, which carries the role."""
        delta = ChatDelta(role=ROLE, content="")
        return [ChatChunkChoice(index=index, delta=delta) for index in range(self._request.n)]

    def _chunk_choices(
        self, completion: CompletionOutput, parts: list[ChoicePart]
    ) -> Iterator[ChatChunkChoice]:
        """Yield the chunks of one step, even if empty: clients count and time chunks.

        Text after a tool call gets another chunk; the tokens go with the first one.
        """
        for number, part in enumerate(parts):
            is_first = number == 0
            has_more = part.tool_calls or part.reasoning
            content = UNSET if has_more and not part.content else part.content
            reasoning = part.reasoning or UNSET
            yield ChatChunkChoice(
                index=completion.index,
                delta=ChatDelta(
                    content=content, reasoning=reasoning, reasoning_content=reasoning, **self._calls(part)
                ),
                logprobs=self._logprobs(completion) if is_first else None,
                finish_reason=self._finish_reason(part),
                stop_reason=completion.stop_reason if part.finish_reason else UNSET,
                token_ids=completion.token_ids if is_first and self._request.return_token_ids else UNSET,
            )

    def _calls(self, part: ChoicePart) -> dict[str, Any]:
        """Return the calls of a part, as `tool_calls` or the legacy `function_call`."""
        if self._request.functions:
            return {"function_call": function_call(part.tool_calls)}
        return {"tool_calls": [self._as_described(call) for call in part.tool_calls] or UNSET}

    def _as_described(self, call: ToolCallMessage) -> AnyToolCall:
        """Return the call in the form in which the client described its tool."""
        name = call.function.name
        if not any(tool.is_custom and tool.function.name == name for tool in self._request.shown_tools):
            return call
        custom = CustomCall(name, custom_input(call.function.arguments))
        return CustomToolCall(index=call.index, id=call.id, custom=custom)

    def _finish_reason(self, part: ChoicePart) -> str | None:
        is_old = part.finish_reason == "tool_calls" and bool(self._request.functions)
        return "function_call" if is_old else part.finish_reason

    def chunk(
        self, choices: list[ChatChunkChoice], more: dict[str, Any], prompt_token_ids: list[int] | None = None
    ) -> ChatChunk:
        """Return a chunk of the stream with the additional fields `more`."""
        shown = prompt_token_ids if self._request.return_token_ids else None
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            prompt_token_ids=UNSET if shown is None else shown,
            **more,
        )

    def _builder(self, completion: CompletionOutput) -> ChatChoiceBuilder:
        builder = self._choices.get(completion.index)
        if builder is None:
            builder = self._choices[completion.index] = self._new_builder()
        return builder

    def _new_builder(self) -> ChatChoiceBuilder:
        formats = self._form.answer_format
        return ChatChoiceBuilder(
            formats.reader(self._begin, self._tools),
            formats.counter(self._begin, self._tools),
            shows_reasoning=self._request.include_reasoning,
            max_calls=None if self._request.parallel_tool_calls else 1,
        )

    @property
    def _reasoning_tokens(self) -> int | None:
        """Reasoning tokens of all choices; None if the model does not reason."""
        if self._form.answer_format.formats.reasoning is None:
            return None
        return sum(builder.num_reasoning_tokens for builder in self._choices.values())

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        listed = self._request.logprob_token_ids
        top = (self._request.top_logprobs or 0) if listed is None else listed
        naming = naming_of(as_ids=self._request.return_tokens_as_token_ids)
        return chat_logprobs(completion.logprobs or [], top, naming)
