# SPDX-License-Identifier: Apache-2.0
"""Generation for one HTTP request, shared by all endpoint families: outputs, usage and timings.

Invariant: closing `Outputs` closes every engine generator in it, which aborts running requests. A failed output is
raised, never passed on as text. Exactly one chunk of a stream, the last, carries `UsageMeter.closing`: as with OpenAI a
separate chunk if usage was requested, else the chunk that ends the last choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from quire.adapters import AdapterRequest, adapter_terms
from quire.engine.queue_limits import QueueReservation
from quire.entrypoints.openai.merged import Indexed, merged
from quire.entrypoints.openai.notes import RequestNotes
from quire.entrypoints.openai.protocol.requests import GenerationRequest
from quire.entrypoints.openai.protocol.responses import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Timings,
    Usage,
)
from quire.errors import FOREIGN_WORDS, DeadlineError, EngineError, UnavailableError, ValidationError
from quire.inputs import TokensPrompt
from quire.kv_transfer_params import PULL_FAILED
from quire.outputs import CompletionOutput, RequestOutput, RequestStateStats, joined_stats
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.structured_outputs_params import FAULT, PARAM

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

NO_MEDIA: Mapping[str, int] = {}

# Handles a non-final output immediately, or does nothing and returns False.
InlineConsumer = Callable[[int, RequestOutput], bool]


def media_details(media_tokens: Mapping[str, int]) -> dict[str, int | UnsetType]:
    """Return the fields of `PromptTokensDetails` for tokens by kind of media."""
    return {f"{kind}_tokens": media_tokens.get(kind) or UNSET for kind in ("image", "video", "audio")}


class UsageMeter:
    """Token counter of one HTTP request; every added output must carry only new tokens.

    Args:
        prompt_lengths: tokens of each prompt, known before the first output.
        media_tokens: number of tokens of the prompts in whose place an "image", a "video" or an "audio" is.
    """

    def __init__(
        self, prompt_lengths: Sequence[int] = (), media_tokens: Mapping[str, int] = NO_MEDIA
    ) -> None:
        self._media_tokens = media_tokens
        self._prompt_tokens = dict(enumerate(prompt_lengths))
        self._latest: dict[int, RequestOutput] = {}
        self._completion_tokens = 0
        # Reasoning tokens among the completion tokens; None if the model does not reason.
        self.reasoning_tokens: int | None = None
        self._sequences: set[tuple[int, int]] = set()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Add an output with all of its completions."""
        self.add_prompt(prompt_index, output)
        for completion in output.outputs:
            self.add_completion(prompt_index, completion)

    def add_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        """Add an output without its completions."""
        self._latest[prompt_index] = output

    def add_completion(self, prompt_index: int, completion: CompletionOutput) -> None:
        """Add the new tokens of one completion."""
        self._sequences.add((prompt_index, completion.index))
        self._completion_tokens += len(completion.token_ids)

    def usage(self) -> Usage:
        latest = self._latest
        known = self._prompt_tokens | {index: len(one.prompt_token_ids) for index, one in latest.items()}
        num_prompt_tokens, num_cached_tokens = (
            sum(known.values()),
            sum(one.num_cached_tokens for one in latest.values()),
        )
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=num_prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                num_cached_tokens,
                sum(one.num_stored_tokens for one in latest.values()) or UNSET,
                **media_details(self._media_tokens),
            ),
            completion_tokens_details=self._completion_details(),
        )

    def _completion_details(self) -> CompletionTokensDetails | UnsetType:
        times = self._times()
        details = CompletionTokensDetails(self.reasoning_tokens or 0)
        if times.num_draft_tokens:
            details.accepted_prediction_tokens = times.num_accepted_tokens
            details.rejected_prediction_tokens = times.num_draft_tokens - times.num_accepted_tokens
        elif self.reasoning_tokens is None:
            return UNSET
        return details

    def _times(self) -> RequestStateStats:
        return joined_stats([output.metrics for output in self._latest.values()])

    def timings(self) -> Timings:
        """Return the timings over all added outputs."""
        return timings_of(self._times(), max(0, self._completion_tokens - len(self._sequences)))

    def closing(self, notes: RequestNotes) -> dict[str, Any]:
        """Return the fields that only the last object of a reply has."""
        params = [one.kv_transfer_params for one in self._latest.values()]
        return {
            "usage": self.usage(),
            "kv_transfer_params": params[0] or UNSET if len(params) == 1 else UNSET,
            "timings": self.timings(),
            "ignored": notes.ignored or UNSET,
            "adjusted": notes.adjusted or UNSET,
        }


def timings_of(times: RequestStateStats, num_later_tokens: int = 0) -> Timings:
    """Return timings; `num_later_tokens` are those after each first token. Unknown times are 0."""
    started = times.scheduled_ts or times.arrival_time
    first = times.first_token_ts or started
    decode_s = max(0.0, times.last_token_ts - first)
    return Timings(
        queue_s=round(max(0.0, started - times.arrival_time), 6),
        prefill_s=round(max(0.0, first - started), 6),
        decode_s=round(decode_s, 6),
        tokens_per_s=round(num_later_tokens / decode_s, 3) if decode_s else 0.0,
    )


class StreamUsage:
    """Usage fields of a stream's chunks.

    Args:
        prompt_lengths: tokens of each prompt of the request.
        force: add usage to every chunk, even if not requested.
        media_tokens: as in `UsageMeter`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompt_lengths: list[int],
        *,
        force: bool,
        media_tokens: Mapping[str, int] = NO_MEDIA,
    ) -> None:
        options = request.stream_options
        self.wanted = force or (options is not None and options.include_usage)
        self._in_every_chunk = self.wanted and (
            force or (options is not None and options.continuous_usage_stats)
        )
        self._notes = request.notes
        self._meter = UsageMeter(prompt_lengths, media_tokens)
        self._num_open = request.n * len(prompt_lengths)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Add an output before its chunks are made."""
        self._meter.add_prompt(prompt_index, output)

    def note_reasoning(self, num_tokens: int | None) -> None:
        """Set the reasoning tokens so far; None if the model does not reason."""
        self._meter.reasoning_tokens = num_tokens

    @property
    def has_uniform_chunks(self) -> bool:
        """True if all chunks that end no choice carry the same usage fields."""
        return not self._in_every_chunk

    def count_only(self, prompt_index: int, completion: CompletionOutput) -> None:
        """Count tokens without making usage fields, for an output that ends no choice."""
        self._meter.add_completion(prompt_index, completion)

    def opening_fields(self) -> dict[str, Any]:
        """Return the fields of a chunk without tokens; OpenAI sends null before the chunk with the usage."""
        if self._in_every_chunk:
            return {"usage": self._meter.usage()}
        return {"usage": None if self.wanted else UNSET}

    def chunk_fields(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """Count a completion's new tokens, and return the fields of its chunk."""
        self._meter.add_completion(prompt_index, completion)
        self._num_open -= completion.finished()
        return self.opening_fields() if self._num_open or self.wanted else self.closing()

    def closing(self) -> dict[str, Any]:
        """Return the fields of the last chunk."""
        return self._meter.closing(self._notes)


class Outputs:
    """Async iterator over the outputs of several prompts, in order of arrival.

    Args:
        prompts: token ids; each prompt is a separate engine request.
        request_id: id of the HTTP request; the engine's ids are derived from it.
        timeout_s: seconds after which a prompt ends as with `max_tokens`, with stop_reason "timeout".
        stream_interval: tokens of one prompt to collect per output.
        place: reserved place in the engine's queue, for all prompts.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        prompts: list[TokensPrompt],
        params: SamplingParams | BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        tenant: str = "",
        adapter_request: AdapterRequest | None = None,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        stream_interval: int = 1,
        place: QueueReservation | None = None,
    ) -> None:
        terms: dict[str, Any] = {
            "priority": priority,
            "tenant": tenant,
            **adapter_terms(adapter_request),
            "timeout_s": timeout_s,
            "trace_headers": trace_headers,
            "data_parallel_rank": data_parallel_rank,
            "place": place,
        }
        self._consumer: InlineConsumer | None = None
        # Several prompts, or collected outputs, have to go through the queue.
        if len(prompts) == 1 and stream_interval <= 1:
            terms["offer"] = self._offer
        generators = [
            _gathered(
                index, engine.generate(prompt, params, f"{request_id}-{index}", **terms), stream_interval
            )
            for index, prompt in enumerate(prompts)
        ]
        self.prompt_lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        self._outputs = generators[0] if len(generators) == 1 else merged(generators)
        self._place = place
        self._first: asyncio.Task[Indexed] | None = None

    async def prime(self, within_s: float) -> None:
        """Wait for the first output, so that errors are raised before the response begins.

        A queued request may wait long: this returns without an output after `within_s` seconds, or a multiple of that
        while the request is not queued yet.
        """
        self._first = asyncio.create_task(self._next())
        try:
            while not (await asyncio.wait({self._first}, timeout=within_s))[0]:
                if self._place is None or not self._place.is_reserved:
                    return
            self._first.result()
        except BaseException:
            await self.aclose()
            raise

    async def _next(self) -> Indexed:
        return await anext(self._outputs)

    async def final(self) -> list[RequestOutput]:
        """Return the last output of each prompt, in prompt order."""
        async with aclosing(self):
            last = {index: output async for index, output in self}
        return [last[index] for index in sorted(last)]

    def offer_to(self, consumer: InlineConsumer) -> None:
        """Offer outputs to `consumer` first, whenever the reader is waiting and no output is buffered."""
        self._consumer = consumer

    def _offer(self, output: RequestOutput) -> bool:
        if self._consumer is None or _ends_any(output):
            return False
        return self._consumer(0, output)

    def __aiter__(self) -> AsyncIterator[Indexed]:
        return self

    async def __anext__(self) -> Indexed:
        if self._first is None:
            return await anext(self._outputs)
        output = await self._first
        self._first = None
        return output

    async def aclose(self) -> None:
        if self._first is not None:  # a running generator cannot be closed
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._outputs.aclose()


async def _gathered(
    index: int, outputs: AsyncGenerator[RequestOutput, None], interval: int
) -> AsyncGenerator[Indexed, None]:
    """Yield one engine request's outputs, collected up to `interval` tokens; the first token is never delayed."""
    gathered: RequestOutput | None = None
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            if _ends_any(output):
                _raise_failure(output)
                _report_timeout_as_length(output, is_first=is_first)
            if gathered is None:
                gathered = output
            else:
                gathered.add(output)
            if is_first or interval <= 1 or gathered.finished or _num_tokens(gathered) >= interval:
                yield index, gathered
                gathered, is_first = None, False


def _ends_any(output: RequestOutput) -> bool:
    # No generator expression: it costs more than the test itself, which runs for every token.
    for completion in output.outputs:  # noqa: SIM110
        if completion.finish_reason is not None:
            return True
    return False


def _num_tokens(output: RequestOutput) -> int:
    return max(len(completion.token_ids) for completion in output.outputs)


def _raise_failure(output: RequestOutput) -> None:
    """Raise the error of a failed completion.

    Raises:
        ValidationError: the core rejected the request, or its constraint cannot be enforced further.
        UnavailableError: the blocks of its prompt did not come from another engine.
        EngineError: it failed otherwise or was aborted.
    """
    for completion in output.outputs:
        if completion.finish_reason in ("error", "abort"):
            how = "failed" if completion.finish_reason == "error" else "was aborted"
            reason = completion.stop_reason if isinstance(completion.stop_reason, str) else ""
            if completion.refused:
                raise ValidationError(reason)
            if reason.startswith(FAULT):
                raise ValidationError(reason, param=PARAM)
            if reason == PULL_FAILED:
                raise UnavailableError(reason)
            why = f": {reason.partition(FOREIGN_WORDS)[0]}" if reason else ""
            raise EngineError(f"the request {how} in the engine before it was complete{why}")


def _report_timeout_as_length(output: RequestOutput, *, is_first: bool) -> None:
    """Report a timeout as finish reason "length", which clients understand.

    Raises:
        DeadlineError: no text was generated.
    """
    late = [completion for completion in output.outputs if completion.finish_reason == "timeout"]
    if late and is_first and not _num_tokens(output):
        raise DeadlineError("the request timed out before a token was generated")
    for completion in late:
        completion.finish_reason, completion.stop_reason = "length", "timeout"
