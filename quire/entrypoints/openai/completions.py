# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions

Invariant: text, tokens and logprobs of a stream's chunks concatenate to those of the same request without stream.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.queue_limits import QueueReservation
from quire.entrypoints.openai.errors import own_id_of
from quire.entrypoints.openai.generation import Outputs, StreamUsage, UsageMeter
from quire.entrypoints.openai.logprobs import (
    Top,
    completion_logprobs,
    id_text,
    naming_of,
    prompt_logprobs_json,
)
from quire.entrypoints.openai.openapi.operation import Operation, data_events, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.prompts import MAX_SEQUENCES, completion_prompts, num_sequences
from quire.entrypoints.openai.protocol.requests import CompletionRequest
from quire.entrypoints.openai.protocol.responses import Completion, CompletionChoice, PromptPosition
from quire.entrypoints.openai.sampling import (
    COMPLETION_MAX_TOKENS,
    check_ranking,
    completion_params,
    is_ranked,
    note_max_tokens,
    search_params,
)
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.streaming import frame, respond
from quire.entrypoints.openai.tenant import READ_HEADERS, tenant_of
from quire.outputs import CompletionOutput, PositionLogprobs, PromptPositions, RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams

router = APIRouter()


@router.post("/v1/completions")
@describe(
    Operation(
        body=(CompletionRequest,),
        reply=Completion,
        stream=data_events(Completion),
        errors=(404, 504),
        headers=READ_HEADERS,
    )
)
async def create_completion(request: Request) -> Response:
    """Complete one or several prompts."""
    body = await read_request(request, CompletionRequest)
    answer_id = f"cmpl-{own_id_of(request.scope)}"
    answer = CompletionAnswer(server_of(request), body, answer_id, tenant_of(request, body))
    return await respond(request, body, answer)


class CompletionAnswer:
    """Response writer of one completion request, whole or streamed."""

    def __init__(
        self,
        server: ServerState,
        request: CompletionRequest,
        answer_id: str,
        tenant: str,
        default_max_tokens: int | None = COMPLETION_MAX_TOKENS,
    ) -> None:
        self._server = server
        self._request = request
        self._id = answer_id
        self._tenant = tenant
        self._model = server.check_model(request.model)
        self._adapter = server.adapters.get(self._model)  # looked up now: it may be unloaded at any time
        self._form = server.form
        self._created = int(time.time())
        self._num_chars: dict[int, int] = {}
        self._prompt_positions: dict[int, PromptPositions] = {}
        self._default_max_tokens = default_max_tokens
        self.params: SamplingParams | BeamSearchParams | None = None  # Set by `start`.

    @property
    def num_sequences(self) -> int:
        return max(1, min(num_sequences(self._request), MAX_SEQUENCES))

    async def start(self, place: QueueReservation) -> Outputs:
        engine, request = self._server.engine, self._request
        self._form = await self._server.form_of(self._adapter)
        check_ranking(request, engine.config.model.logprobs_mode)
        defaults, detokenize = engine.input_processor.default_sampling_params, engine.tokenizer is not None
        if request.suffix and (ends := self._form.fill_in.end_ids):
            request.stop_token_ids = [*(request.stop_token_ids or ()), *ends]
        params = search_params(request, 0) or completion_params(
            request, defaults, detokenize=detokenize, default_max_tokens=self._default_max_tokens
        )
        self.params = params
        prompts = await completion_prompts(self._server, self._form, request)
        room = engine.input_processor.room
        note_max_tokens(request, params, [room(len(prompt["prompt_token_ids"])) for prompt in prompts])
        interval = engine.config.scheduler.stream_interval
        return Outputs(
            engine,
            prompts,
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

    @property
    def model(self) -> str:
        """Name of the model for the reply."""
        return self._model

    def whole(self, outputs: list[RequestOutput]) -> Completion:
        meter = UsageMeter()
        choices = []
        for prompt_index, output in enumerate(map(self._shown, outputs)):
            meter.add(prompt_index, output)
            chosen = self._chosen(output)
            choices += [self._choice(prompt_index, output, completion) for completion in chosen]
        return self.chunk(choices, meter.closing(self._request.notes))

    def frames(self, prompt_lengths: list[int]) -> CompletionFrames:
        force = self._server.config.enable_force_include_usage
        return CompletionFrames(self, StreamUsage(self._request, prompt_lengths, force=force))

    def chunks_of(self, prompt_index: int, output: RequestOutput, usage: StreamUsage) -> Iterator[Completion]:
        """Yield the chunks of one output."""
        shown = self._shown(output)
        usage.add(prompt_index, shown)
        for completion in shown.outputs:
            choice = self._choice(prompt_index, shown, completion)
            yield self.chunk([choice], usage.chunk_fields(prompt_index, completion))

    def _shown(self, output: RequestOutput) -> RequestOutput:
        """Return the output without the token that was generated only because the engine needs at least one."""
        if self._request.max_tokens != 0:
            return output
        empty = [
            CompletionOutput(one.index, "", [], logprobs=[], finish_reason="length") for one in output.outputs
        ]
        return dataclasses.replace(output, outputs=empty)

    def _chosen(self, output: RequestOutput) -> list[CompletionOutput]:
        """Return the completions that become choices: all, or the `n` of `best_of` with the highest mean logprob."""
        by_index = sorted(output.outputs, key=lambda completion: completion.index)
        if not is_ranked(self._request):
            return by_index
        best = sorted(by_index, key=_mean_logprob, reverse=True)[: self._request.n]
        return [dataclasses.replace(completion, index=place) for place, completion in enumerate(best)]

    def chunk(self, choices: list[CompletionChoice], more: dict[str, Any]) -> Completion:
        """Return a chunk of a stream, or the whole answer."""
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, **more)

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        request, index = self._request, prompt_index * self._request.n + completion.index
        is_first = index not in self._num_chars
        text, logprobs, offset = completion.text, None, self._num_chars.get(index, 0)
        if is_first and request.echo:
            text = self.prompt_text(output) + text
        naming = naming_of(as_ids=request.return_tokens_as_token_ids)
        top: Top | None = request.logprobs if request.logprob_token_ids is None else request.logprob_token_ids
        if top is not None:
            if output.prompt_logprobs is not None:  # sent once by the engine, and needed by every choice
                self._prompt_positions[prompt_index] = output.prompt_logprobs
            ids, positions = (
                list(completion.token_ids),
                list[PositionLogprobs | None](completion.logprobs or []),
            )
            if is_first and request.echo:
                ids = [*output.prompt_token_ids, *ids]
                positions = [*self._prompt_positions[prompt_index], *positions]
            logprobs, offset = completion_logprobs(ids, positions, top, offset, self._token_text, naming)
        self._num_chars[index] = offset
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_logprobs=UNSET if request.stream else self._prompt_logprobs(output),
            prompt_token_ids=output.prompt_token_ids if is_first and request.return_token_ids else UNSET,
            token_ids=completion.token_ids if request.return_token_ids else UNSET,
        )

    def prompt_text(self, output: RequestOutput) -> str:
        """Return the text of a prompt."""
        if output.prompt is not None:
            return output.prompt
        skip = self._request.skip_special_tokens
        return self._form.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip)

    def _prompt_logprobs(self, output: RequestOutput) -> list[PromptPosition | None] | None:
        asked = self._request.prompt_logprobs is not None  # otherwise they were requested for `echo` only
        return prompt_logprobs_json(output.prompt_logprobs) if asked else None

    def _token_text(self, token_id: int) -> str:
        has_texts = self._server.engine.tokenizer is not None
        return self._form.tokenizer.token_text(token_id) if has_texts else id_text(token_id)


class CompletionFrames:
    """Encoder of one streamed answer."""

    def __init__(self, answer: CompletionAnswer, usage: StreamUsage) -> None:
        self._answer = answer
        self._usage = usage

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        return b"".join(map(frame, self._answer.chunks_of(prompt_index, output, self._usage)))

    def closing(self) -> bytes:
        return frame(self._answer.chunk([], self._usage.closing())) if self._usage.wanted else b""


def _mean_logprob(completion: CompletionOutput) -> float:
    return (completion.cumulative_logprob or 0.0) / max(1, len(completion.token_ids))
