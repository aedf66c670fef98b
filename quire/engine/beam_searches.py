"""The beam searches in flight: what the cores say of beams in, the next beams out, and at the end one output.

Invariant: each step of a search is a request for each live beam, which generates one token and is kept by the core; the
next beams go on from these, which are closed with the same messages. An error of ours ends its own search alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from quire.beam_search_params import BeamSearchParams
from quire.engine.beam_search import BeamSearch, Finished
from quire.engine.detokenizer import IncrementalDetokenizer
from quire.engine.messages import AbortRequests, CoreRequest, EngineCoreRequest, add_message
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.request_groups import Sink
from quire.engine.sequence_state import OUTPUT_FAILED, position_of
from quire.engine.tokenizer import Tokenizer
from quire.metrics.stats import EndedRequest, FinishedRequestStats, IterationStats
from quire.outputs import CompletionOutput, PositionLogprobs, RequestOutput, RequestStateStats
from quire.scheduler.output import RequestUpdate, TokenLogprobs

logger = logging.getLogger(__name__)


class BeamSearches:
    """Owns the front-end state of all beam searches."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._of_id: dict[str, _Search] = {}

    @property
    def num_unfinished(self) -> int:
        """Sequences that searches follow at most."""
        return len(self._of_id) // 2

    def add(
        self,
        label: str,
        prompt: TokenizedPrompt,
        first: EngineCoreRequest,
        params: BeamSearchParams,
        sink: Sink,
        trace_headers: Mapping[str, str] | None = None,
    ) -> tuple[list[str], list[CoreRequest]]:
        """Begin a search; returns the core ids that its beams will ever have, and what to send."""
        tokenizer = self._tokenizer if prompt.lexicon is None else prompt.lexicon.tokenizer
        search = _Search(label, prompt, first, params, sink, tokenizer, trace_headers or {})
        self._of_id.update(dict.fromkeys(search.core_ids, search))
        return search.core_ids, [add_message(search.requests())]

    def process(
        self, updates: Iterable[RequestUpdate], now: float, stats: IterationStats
    ) -> list[CoreRequest]:
        """Take in what a core says of beams; returns what to send to it."""
        messages: list[CoreRequest] = []
        for update in updates if self._of_id else ():
            search = self._of_id.get(update.request_id)
            if search is None:
                continue
            try:
                messages += search.apply(update, now, stats)
            except BaseException as error:
                messages += self._drop(search, error)
            if search.is_over:
                self._forget(search)
        return messages

    def end(self, core_ids: Iterable[str], reason: str, now: float, stats: IterationStats) -> list[str]:
        """End the searches that these ids belong to with what they have; returns all of their ids, for the core."""
        ended: list[str] = []
        for search in self._found(core_ids):
            ended += search.core_ids
            self._forget(search)
            try:
                search.finish(reason, now, stats)
            except BaseException as error:
                self._drop(search, error)
        return ended

    def resume(self, core_ids: Iterable[str]) -> list[EngineCoreRequest]:
        """What a core that knows nothing must be asked for, so that the searches go on."""
        return [request for search in self._found(core_ids) for request in search.unreported()]

    def fail(self, core_ids: Iterable[str], error: Exception, now: float, stats: IterationStats) -> None:
        """The searches of these ids end with this error."""
        for search in self._found(core_ids):
            self._forget(search)
            search.record_end(["error"], now, stats)
            search.sink(error)

    def _found(self, core_ids: Iterable[str]) -> list[_Search]:
        return list({id(one): one for name in core_ids if (one := self._of_id.get(name))}.values())

    def _forget(self, search: _Search) -> None:
        for core_id in search.core_ids:
            self._of_id.pop(core_id, None)

    def _drop(self, search: _Search, error: BaseException) -> list[CoreRequest]:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        logger.error("the output of request %s could not be made", search.label, exc_info=error)
        self._forget(search)
        search.sink(search.failure(OUTPUT_FAILED))
        return [AbortRequests(search.core_ids)]


class _Search:
    """One search: the requests of its step, and what has come of them."""

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
        name, width = first.request_id, params.beam_width
        # Two sets that take turns: while the beams of one begin, those of the other are kept.
        self._names = [[f"{name}.{kind}{beam}" for beam in range(width)] for kind in "ab"]
        self.core_ids = [*self._names[0], *self._names[1]]
        self._entries: dict[str, TokenLogprobs] = {}
        self._num_cached_tokens = 0
        self._stats = RequestStateStats(arrival_time=first.arrival_time)

    def requests(self) -> list[EngineCoreRequest]:
        """One for each live beam, a fork of the one it goes on from."""
        mine, before = self._names[self._search.length % 2], self._names[(self._search.length + 1) % 2]
        wanted = max(self._search.num_candidates, self._params.logprobs)
        params = self._first.sampling_params.clone(max_tokens=self._search.length + 1, logprobs=wanted)
        return [
            msgspec.structs.replace(
                self._first,
                request_id=mine[place],
                sampling_params=params,
                eos_token_ids=[],
                fork_of=before[beam.parent] if beam.token_ids else None,
                output_token_ids=beam.token_ids,
                num_beams=self._params.beam_width,
                beam=place,
            )
            for place, beam in enumerate(self._search.live)
        ]

    def unreported(self) -> list[EngineCoreRequest]:
        """Those of which nothing has come yet; what they would have gone on from is gone."""
        open_ones = [one for one in self.requests() if one.request_id not in self._entries]
        return [msgspec.structs.replace(one, fork_of=None) for one in open_ones]

    def apply(self, update: RequestUpdate, now: float, stats: IterationStats) -> list[CoreRequest]:
        """Take in the token of a beam; the last one of a step makes the next step, or the output."""
        self._record(update, now, stats)
        if update.finish_reason != "length" or not update.logprobs:
            self.is_over = True
            self.record_end(["error"], now, stats)
            self.sink(self.failure(update.error or update.stop_reason, refused=update.refused))
            return [AbortRequests(self.core_ids)]
        self._entries[update.request_id] = update.logprobs[0]
        names = self._names[self._search.length % 2][: len(self._search.live)]
        if len(self._entries) < len(names):
            return []
        entries, self._entries = [self._entries[name] for name in names], {}
        self._search.advance(entries)
        if not self._search.is_done:
            return [add_message(self.requests()), AbortRequests(names)]
        self.is_over = True
        self.finish(None, now, stats)
        return [AbortRequests(names)]

    def finish(self, reason: str | None, now: float, stats: IterationStats) -> None:
        """Give out the best sequences; with a reason, live ones too."""
        best = self._search.best(reason)
        stats.finished += [self._finished_stats(index, one, now) for index, one in enumerate(best)]
        self.record_end([one.reason for one in best], now, stats)
        self.sink(self._output([self._completion(index, one) for index, one in enumerate(best)]))

    def record_end(self, reasons: list[str], now: float, stats: IterationStats) -> None:
        """What there is to tell of the whole search."""
        num_tokens = self._stats.num_generation_tokens
        ended = EndedRequest(
            label=self.label,
            params=self._first.sampling_params,
            num_sequences=self._params.beam_width,
            finish_reasons=reasons,
            num_prompt_tokens=len(self._prompt.token_ids),
            num_cached_tokens=self._num_cached_tokens,
            num_generation_tokens=num_tokens,
            max_num_generation_tokens=self._search.length,
            times=self._stats,
            ended_ts=now,
            trace_headers=self._trace_headers,
        )
        stats.ended.append(ended)

    def failure(self, why: int | str | None, *, refused: bool = False) -> RequestOutput:
        """The output of a search that cannot go on."""
        end = CompletionOutput(0, "", [], finish_reason="error", stop_reason=why, refused=refused)
        return self._output([end])

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.label,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=completions,
            finished=True,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._stats,
        )

    def _completion(self, index: int, one: Finished) -> CompletionOutput:
        tokens = one.beam.token_ids
        silent = one.reason == "stop" and not self._params.include_stop_str_in_output
        text, positions = self._decoded(tokens, one.beam.positions, len(tokens) - silent)
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
            stats.num_prompt_tokens += len(self._prompt.token_ids)
            stats.num_cached_tokens += update.num_cached_tokens
            stats.time_to_first_token_s.append(now - mine.arrival_time)
        mine.last_token_ts = now
        mine.num_preemptions += update.num_preemptions
        mine.num_draft_tokens += update.num_draft_tokens
        mine.num_accepted_tokens += update.num_accepted_tokens
        mine.num_generation_tokens += count
        stats.num_generation_tokens += count

    def _finished_stats(self, index: int, one: Finished, now: float) -> FinishedRequestStats:
        times = self._stats
        started, first = times.scheduled_ts or now, times.first_token_ts or now
        return FinishedRequestStats(
            finish_reason=one.reason,
            num_prompt_tokens=len(self._prompt.token_ids),
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
