"""POST /v1/chat/completions

Invariant: the deltas of a stream join to the message of the same request without stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.queue_limits import Place
from quire.entrypoints.chat.call_arguments import custom_input
from quire.entrypoints.chat.formats.events import Event, Tools
from quire.entrypoints.chat.formats.model import PromptEnd
from quire.entrypoints.openai.beam_search import beam_search_params
from quire.entrypoints.openai.chat_choice import ChatChoiceBuilder, ChoicePart
from quire.entrypoints.openai.chat_frames import ChatFrames
from quire.entrypoints.openai.chat_prompt import TextPrompt, chat_prompt, text_prompt
from quire.entrypoints.openai.errors import own_id_of
from quire.entrypoints.openai.generation import Outputs
from quire.entrypoints.openai.legacy_functions import function_call, old_names, translate
from quire.entrypoints.openai.logprobs import chat_logprobs, naming_of, prompt_logprobs_json
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.openapi.streams import data_events
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
    ToolCallMessage,
)
from quire.entrypoints.openai.respond import respond
from quire.entrypoints.openai.sampling import chat_params, note_max_tokens
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.stream_usage import StreamUsage
from quire.entrypoints.openai.tenant import READ_HEADERS, tenant_of
from quire.entrypoints.openai.tool_choice import constrained, tool_constraint, tools_in_use
from quire.entrypoints.openai.usage import UsageMeter
from quire.errors import ValidationError
from quire.inputs import TokensPrompt
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams

ROLE = "assistant"
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
        answer = ChatAnswer(server_of(request), body, answer_id, tenant_of(request, body))
        return await respond(request, body, answer)


class ChatAnswer:
    """Writes the answer to one request, whole or in chunks.

    Args:
        text: what is continued in place of the request's conversation; the answer is text alone then.
    """

    def __init__(
        self,
        server: ServerState,
        request: ChatCompletionRequest,
        answer_id: str,
        tenant: str,
        text: TextPrompt | None = None,
    ) -> None:
        self._server = server
        self._request = request
        self._id = answer_id
        self._tenant = tenant
        self._text = text
        self._model = server.check_model(request.model)
        self._adapter = server.adapters.get(self._model)  # now: it may be unloaded at any time
        self._created = int(time.time())
        self._form = server.form
        self._tools: Tools | None = None
        self._begin = PromptEnd()
        self._choices: dict[int, ChatChoiceBuilder] = {}

    @property
    def num_sequences(self) -> int:
        return max(1, min(self._request.n, MAX_SEQUENCES))

    async def start(self, place: Place) -> Outputs:
        engine, request = self._server.engine, self._request
        form = await self._server.form_of(self._adapter)
        self._form = form if self._text is None else form.as_text
        if self._text is not None and self._text.suffix and (ends := form.fill_in.end_ids):
            request.stop_token_ids = [*(request.stop_token_ids or ()), *ends]
        self._tools = tools_in_use(self._server, self._form, request)
        room, answers = engine.config.model.max_model_len, self._form.answer_format
        params = beam_search_params(request, room, answers.shown_ids) or chat_params(
            request, engine.input_processor.default_sampling_params
        )
        if self._text is None:
            chat = await chat_prompt(self._server, form, request, with_tools=self._tools is not None)
        else:
            chat = await text_prompt(self._server, form, request, self._text)
        self._begin = chat.end
        if isinstance(params, SamplingParams):
            params = answers.settled(params, chat.end)
            params = await constrained(self._server, self._form, request, self._tools, chat, params)
        elif tool_constraint(self._form, request, self._tools, chat.end) is not None:
            raise ValidationError("a beam search cannot be held to a form", param="use_beam_search")
        prompt = with_options(TokensPrompt(prompt_token_ids=chat.token_ids), request)
        note_max_tokens(request, params, [engine.input_processor.room(len(prompt["prompt_token_ids"]))])
        interval = engine.config.scheduler.stream_interval
        return Outputs(
            engine,
            [prompt],
            params,
            self._id,
            priority=request.priority,
            tenant=self._tenant,
            lora_request=self._adapter,
            timeout_s=request.time_left(),
            trace_headers=request.trace_headers,
            data_parallel_rank=request.replica,
            stream_interval=interval,
            place=place,
        )

    def whole(self, outputs: list[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        meter = UsageMeter()
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
        shows_tokens = bool(self._request.logprobs or self._request.return_token_ids)
        return ChatFrames(self, self.stream_usage(prompt_lengths), shows_tokens=shows_tokens)

    def stream_usage(self, prompt_lengths: list[int]) -> StreamUsage:
        """What the chunks of a stream tell of the whole."""
        force = self._server.config.enable_force_include_usage
        return StreamUsage(self._request, prompt_lengths, force=force)

    def choice(self, index: int) -> ChatChoiceBuilder | None:
        """What reads a choice, once the answer has begun."""
        return self._choices.get(index)

    def chunks_of_whole(self, output: RequestOutput) -> Iterator[ChatChunk]:
        """The stream that a final output would have been in one piece, with usage."""
        usage = StreamUsage(self._request, [len(output.prompt_token_ids)], force=True)
        yield from self.chunks_of(output, usage)
        yield self.chunk([], usage.closing())

    def chunks_of(self, output: RequestOutput, usage: StreamUsage) -> Iterator[ChatChunk]:
        """What one output adds to the stream; the first one begins it."""
        usage.add(0, output)
        if not self._choices:
            for opening in self._openings():
                yield self.chunk([opening], usage.of_opening(), output.prompt_token_ids)
        for completion in output.outputs:
            builder, reason = self._builder(completion), completion.finish_reason
            found = builder.read(completion.text, completion.token_ids, reason, was_cut=completion.was_cut)
            usage.note_reasoning(self._reasoning_tokens)
            *earlier, last = self._chunk_choices(completion, builder.arranged(found, reason))
            told = usage.of_chunk(0, completion)
            for choice in earlier:
                yield self.chunk([choice], usage.of_opening())
            yield self.chunk([last], told)

    def chunks_of_piece(
        self, completion: CompletionOutput, found: list[Event], more: dict[str, Any]
    ) -> Iterator[ChatChunk]:
        """Those of a piece of a choice that has begun and goes on, in which this was found; all have `more`."""
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
        )

    def _openings(self) -> list[ChatChunkChoice]:
        """Every choice's first chunk, which brings the role."""
        delta = ChatDelta(role=ROLE, content="")
        return [ChatChunkChoice(index=index, delta=delta) for index in range(self._request.n)]

    def _chunk_choices(
        self, completion: CompletionOutput, parts: list[ChoicePart]
    ) -> Iterator[ChatChunkChoice]:
        """The news of one step, also if they are no text yet: clients count chunks, and time them.

        There is another one for each text that comes after a call; the tokens go with the first.
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
        """The calls of a part, by the name that the client knows."""
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
        """A chunk of a stream; `more` are its fields besides those that all have."""
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
        """Of all choices; None if the model does not reason."""
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
