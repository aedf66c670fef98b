# SPDX-License-Identifier: Apache-2.0
"""Beam searches in flight, in the front end.

Invariant: a search is one request, whose beams the core selects (`quire.beam_search.search`). Each update has the
entries from which it did, so the front end's copy of the search is at the same beams, and can end it at any time. An
error in the front end ends its own search only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quire.adapters import AdapterRequest
from quire.beam_search.search import BeamSearch, FinishedBeam
from quire.engine.detokenizer import IncrementalDetokenizer
from quire.engine.input_processor import InputProcessor
from quire.engine.messages import AbortRequests, CoreRequest, EngineCoreRequest, add_message
from quire.engine.output_processor import OUTPUT_FAILED, Sink, position_of
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.request_owner import RequestOwner
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.kv_transfer_params import FIELD
from quire.metrics.stats import EndedRequest, FinishedRequestStats, IterationStats
from quire.outputs import CompletionOutput, PositionLogprobs, RequestOutput, RequestStateStats
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.scheduler.output import RequestUpdate, TokenLogprobs

logger = logging.getLogger(__name__)


def search_request(
    processor: InputProcessor,
    request_id: str,
    prompt: TokenizedPrompt,
    params: BeamSearchParams,
    *,
    priority: int = 0,
    tenant: str = "",
    adapter_request: AdapterRequest | None = None,
) -> tuple[EngineCoreRequest, BeamSearchParams]:
    """Return the request of a search, and its parameters, after all checks against the model.

    Raises:
        ValidationError: names the field, its value's problem and the limit.
    """
    mode, limit = processor.config.model.logprobs_mode, processor.config.model.max_logprobs
    if mode.endswith("logits"):
        raise ValidationError(f"a beam search adds up logprobs, and --logprobs-mode is {mode}")
    if 0 <= limit < params.logprobs:
        raise ValidationError(
            f"logprobs is {params.logprobs}, the limit is {limit} (--max-logprobs)", param="logprobs"
        )
    if prompt.kv_transfer_params is not None:
        raise ValidationError("a beam search cannot be transferred", param=FIELD)
    plain = SamplingParams(
        temperature=0.0, max_tokens=params.max_tokens, detokenize=False, extra_args=params.extra_args
    )
    (first,) = processor.process(
        request_id, prompt, plain, priority=priority, tenant=tenant, adapter_request=adapter_request
    )
    max_tokens = first.sampling_params.max_tokens or params.max_tokens
    if processor.encoder_prompts is not None:
        params = processor.encoder_prompts.searched(prompt, params)
    least = min(params.min_tokens, max_tokens)
    params = msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=least)
    wanted = BeamSearch(params, first.eos_token_ids).num_logprobs
    sampled = first.sampling_params.replace_unchecked(logprobs=wanted)
    return msgspec.structs.replace(first, sampling_params=sampled, search=params), params


class BeamSearches(RequestOwner):
    """Front-end state of all beam searches."""

    params_type = BeamSearchParams

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        super().__init__(tokenizer)
        self._of_id: dict[str, _Search] = {}

    @property
    def num_unfinished(self) -> int:
        """Upper bound of the sequences that the searches follow."""
        return sum(search.width for search in self._of_id.values())

    def submit(
        self,
        processor: InputProcessor,
        name: str,
        label: str,
        prompt: TokenizedPrompt,
        params: BeamSearchParams,
        terms: Mapping[str, Any],
        sink: Sink,
        trace_headers: Mapping[str, str] | None = None,
    ) -> tuple[list[str], list[CoreRequest]]:
        """Validate and start a search; return its core id, and the message to send."""
        first, params = search_request(processor, name, prompt, params, **terms)
        return self.add(label, prompt, first, params, sink, trace_headers)

    def add(
        self,
        label: str,
        prompt: TokenizedPrompt,
        first: EngineCoreRequest,
        params: BeamSearchParams,
        sink: Sink,
        trace_headers: Mapping[str, str] | None = None,
    ) -> tuple[list[str], list[CoreRequest]]:
        """Start a search; return its core id, and the message to send."""
        tokenizer = (
            self._tokenizer if prompt.tokenizer_context is None else prompt.tokenizer_context.tokenizer
        )
        search = _Search(label, prompt, first, params, sink, tokenizer, trace_headers or {})
        self._of_id[first.request_id] = search
        return [first.request_id], [add_message([first])]

    def process(
        self, updates: Iterable[RequestUpdate], now: float, stats: IterationStats
    ) -> list[CoreRequest]:
        """Process a core's updates of searches; return the messages to send to it."""
        messages: list[CoreRequest] = []
        for update in updates if self._of_id else ():
            search = self._of_id.get(update.request_id)
            if search is None:
                continue
            try:
                search.apply(update, now, stats)
            except BaseException as error:
                messages += self._drop(search, error)
            if search.is_over:
                self._forget(search)
        return messages

    def end(self, core_ids: Iterable[str], reason: str, now: float, stats: IterationStats) -> list[str]:
        """End the searches of these ids with their current results; return all of their core ids."""
        ended: list[str] = []
        for search in self._found(core_ids):
            ended.append(search.core_id)
            self._forget(search)
            try:
                search.finish(reason, now, stats)
            except BaseException as error:
                self._drop(search, error)
        return ended

    def resume(self, core_ids: Iterable[str]) -> list[EngineCoreRequest]:
        """Return the requests with which a restarted core continues the searches."""
        return [search.restarted() for search in self._found(core_ids)]

    def fail(self, core_ids: Iterable[str], error: Exception, now: float, stats: IterationStats) -> None:
        """End the searches of these ids with this error."""
        for search in self._found(core_ids):
            self._forget(search)
            search.record_end(["error"], now, stats)
            search.sink(error)

    def _found(self, core_ids: Iterable[str]) -> list[_Search]:
        return [one for name in core_ids if (one := self._of_id.get(name))]

    def _forget(self, search: _Search) -> None:
        self._of_id.pop(search.core_id, None)

    def _drop(self, search: _Search, error: BaseException) -> list[CoreRequest]:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        logger.error("the output of request %s could not be made", search.label, exc_info=error)
        self._forget(search)
        search.sink(search.failure(OUTPUT_FAILED))
        return [AbortRequests([search.core_id])]


class _Search:
    """One search, and its statistics."""

    def __init__(
        self,
        label: str,
        prompt: TokenizedPrompt,
        first: EngineCoreRequest,
        params: BeamSearchParams,
        sink: Sink,
        tokenizer: Tokenizer | None,
        trace_headers: Mapping[str, str],
    ) -> None:
        self.label = label
        self._trace_headers = trace_headers
        self.sink = sink
        self.is_over = False
        self._prompt = prompt
        self._first = first
        self._params = params
        self._tokenizer = tokenizer
        self._search = BeamSearch(params, first.eos_token_ids)
        self.core_id, self.width = first.request_id, params.beam_width
        self._num_cached_tokens = 0
        self._stats = RequestStateStats(arrival_time=first.arrival_time)

    def restarted(self) -> EngineCoreRequest:
        """Begin again, in a core that has nothing of the search; return the request."""
        self._search.restart()
        return self._first

    def apply(self, update: RequestUpdate, now: float, stats: IterationStats) -> None:
        """Process the update of a step; the last one yields the output."""
        if update.finish_reason not in (None, "stop"):
            self.is_over = True
            self.record_end(["error"], now, stats)
            self.sink(self.failure(update.error or update.stop_reason, refused=update.refused))
            return
        entries = update.logprobs or []
        if self._search.length and update.scheduled_ts and update.finish_reason is None:
            self._search.restart()  # first update after a preemption
        self._record(update, now, stats)
        self._search.advance(entries)
        if self._search.is_done:
            self.is_over = True
            self.finish(None, now, stats)

    def finish(self, reason: str | None, now: float, stats: IterationStats) -> None:
        """Emit the best sequences; with a reason, live ones too."""
        best = self._search.best(reason)
        stats.finished += [self._finished_stats(index, one, now) for index, one in enumerate(best)]
        self.record_end([one.reason for one in best], now, stats)
        self.sink(self._output([self._completion(index, one) for index, one in enumerate(best)]))

    def record_end(self, reasons: list[str], now: float, stats: IterationStats) -> None:
        """Record the statistics of the whole search."""
        num_tokens = self._stats.num_generation_tokens
        ended = EndedRequest(
            label=self.label,
            params=self._first.sampling_params,
            num_sequences=self._params.beam_width,
            finish_reasons=reasons,
            num_prompt_tokens=len(self._prompt.given_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_generation_tokens=num_tokens,
            max_num_generation_tokens=self._search.length,
            times=self._stats,
            ended_ts=now,
            trace_headers=self._trace_headers,
        )
        stats.ended.append(ended)

    def failure(self, why: int | str | None, *, refused: bool = False) -> RequestOutput:
        """Return the output of a failed search."""
        end = CompletionOutput(0, "", [], finish_reason="error", stop_reason=why, refused=refused)
        return self._output([end])

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.label,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.given_ids,
            outputs=completions,
            finished=True,
            num_cached_tokens=min(self._num_cached_tokens, len(self._prompt.given_ids)),
            metrics=self._stats,
        )

    def _completion(self, index: int, one: FinishedBeam) -> CompletionOutput:
        tokens = one.beam.token_ids
        silent = one.reason == "stop" and not self._params.include_stop_str_in_output
        text, positions = self._decoded(tokens, one.beam.positions(), len(tokens) - silent)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tokens,
            cumulative_logprob=one.beam.logprob,
            logprobs=positions,
            finish_reason=one.reason,
        )

    def _decoded(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs], num_with_text: int
    ) -> tuple[str, list[PositionLogprobs]]:
        if self._tokenizer is None:
            return "", [position_of(entry, None) for entry in entries]
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            self._prompt.token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            shown=self._params.shown_special_token_ids,
        )
        text, positions = "", []
        for place, (token_id, entry) in enumerate(zip(tokens, entries, strict=True)):
            positions.append(position_of(entry, detokenizer.bytes_of))
            text += detokenizer.push([token_id]) if place < num_with_text else ""
        return text + detokenizer.flush(), positions

    def _record(self, update: RequestUpdate, now: float, stats: IterationStats) -> None:
        mine, count = self._stats, len(update.new_token_ids)
        if not mine.scheduled_ts:
            mine.queued_ts, mine.scheduled_ts = update.queued_ts, update.scheduled_ts
        if count and not mine.first_token_ts:
            mine.first_token_ts, self._num_cached_tokens = now, update.num_cached_tokens
            stats.num_prompt_tokens += len(self._prompt.given_ids)
            stats.num_cached_tokens += update.num_cached_tokens
            stats.time_to_first_token_s.append(now - mine.arrival_time)
        mine.last_token_ts = now
        mine.num_preemptions = max(mine.num_preemptions, update.num_preemptions)
        mine.num_draft_tokens += update.num_draft_tokens
        mine.num_accepted_tokens += update.num_accepted_tokens
        mine.num_generation_tokens += count
        stats.num_generation_tokens += count

    def _finished_stats(self, index: int, one: FinishedBeam, now: float) -> FinishedRequestStats:
        times = self._stats
        started, first = times.scheduled_ts or now, times.first_token_ts or now
        return FinishedRequestStats(
            finish_reason=one.reason,
            num_prompt_tokens=len(self._prompt.given_ids),
            num_generation_tokens=len(one.beam.token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=times.num_preemptions,
            max_tokens=self._params.max_tokens,
            e2e_s=now - times.arrival_time,
            queue_s=max(0.0, started - times.arrival_time),
            prefill_s=max(0.0, first - started),
            decode_s=max(0.0, now - first),
            tenant=self._first.tenant,
            is_fork=index > 0,
        )
