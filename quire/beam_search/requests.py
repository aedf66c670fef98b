# SPDX-License-Identifier: Apache-2.0
"""Beam searches in flight: `BeamSearches` runs them as engine requests, `BeamSearch` is the pure search.

Invariant: a step of a search is one request per live beam, which generates one token and is retained by the core. The
next beams fork from these, which are released with the same messages. An error in the front end ends its own search
only.
`BeamSearch` follows Transformers' `generate(num_beams=...)`. All live beams have one length, the likeliest first, and a
finished beam never changes. Of a step's best candidates, ended ones count only among the first `beam_width`; the search
continues with the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.adapters import AdapterRequest
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
_CERTAIN = -1  # Place of a forced token among the most likely ones.


class Beam(NamedTuple):
    """A sequence of generated tokens."""

    token_ids: list[int]
    logprob: float  # Sum over its tokens.
    positions: list[TokenLogprobs]  # For each token, the token itself and its alternatives.
    parent: int = 0  # Index of the last step's live beam that it continues.


class FinishedBeam(NamedTuple):
    beam: Beam
    score: float
    reason: str  # Either "stop" or "length".


class _Candidate(NamedTuple):
    logprob: float
    parent: int
    place: int  # Index in the parent's most likely tokens.
    token_id: int


class TokenRules:
    """Tokens that a search may not choose, as in transformers: they are passed over, and other logprobs stay.

    Args:
        params: of the search.
        eos_token_ids: tokens that end a sequence, which `min_tokens` bans at first.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        self._always = frozenset(params.banned_token_ids)
        self._ends = eos_token_ids
        self._min_tokens = params.min_tokens
        self._ngram = params.no_repeat_ngram_size
        self._before = list(params.decoder_token_ids)

    def banned(self, token_ids: Sequence[int]) -> frozenset[int]:
        """Return the tokens that may not follow a beam's."""
        found = self._always
        if len(token_ids) < self._min_tokens:
            found |= self._ends
        if self._ngram:
            found |= self._repeating([*self._before, *token_ids])
        return found

    def _repeating(self, ids: Sequence[int]) -> frozenset[int]:
        """Return the tokens that have followed the last tokens, one fewer than an n-gram has, before."""
        size = self._ngram - 1
        if len(ids) < size:
            return frozenset()
        last = ids[len(ids) - size :]
        starts = range(len(ids) - size)
        return frozenset(ids[start + size] for start in starts if ids[start : start + size] == last)


class BeamSearch:
    """Pure state of one beam search.

    Args:
        params: `max_tokens` is at most the available room.
        eos_token_ids: tokens that end a sequence.

    Attributes:
        live: beams that need a next token.
        finished: the best ended beams, best first.
        is_done: the search is complete.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int]) -> None:
        self.params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._rules = TokenRules(params, frozenset(eos_token_ids))
        self._num_wanted = max(2, 1 + len(self._eos)) * params.beam_width
        self.live = [Beam([], 0.0, [])]
        self.finished: list[FinishedBeam] = []
        self.is_done = False

    @property
    def length(self) -> int:
        """Tokens of each live beam."""
        return len(self.live[0].token_ids)

    @property
    def num_candidates(self) -> int:
        """Most likely tokens needed of each live beam in the next step."""
        return self._num_wanted + max(len(self._rules.banned(beam.token_ids)) for beam in self.live)

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Advance by one step; entry i has the most likely next tokens of live beam i, behind its own token."""
        width, length = self.params.beam_width, self.length + 1
        is_last = length >= self.params.max_tokens
        forced = self.params.forced_last_token_id if is_last else None
        candidates = self._candidates(entries) if forced is None else self._forced(forced)
        ended = [is_last or candidate.token_id in self._eos for candidate in candidates]
        first = zip(candidates[:width], ended, strict=False)
        self._finish([self._grown(candidate, entries) for candidate, is_ended in first if is_ended])
        open_ones = [one for one, is_ended in zip(candidates, ended, strict=True) if not is_ended][:width]
        if not open_ones or not self._may_improve(open_ones[0].logprob, length):
            self.is_done = True
            return
        self.live = [self._grown(candidate, entries) for candidate in open_ones]

    def best(self, reason: str | None = None) -> list[FinishedBeam]:
        """Return the best sequences, best first; a reason also ends the live ones."""
        found = list(self.finished)
        if reason is not None and not self.is_done:
            found += [FinishedBeam(beam, self._score(beam), reason) for beam in self.live]
            found.sort(key=lambda one: -one.score)
        return found[: self.params.beam_width]

    def _candidates(self, entries: Sequence[TokenLogprobs]) -> list[_Candidate]:
        most = self.num_candidates
        found: list[_Candidate] = []
        for parent, (beam, entry) in enumerate(zip(self.live, entries, strict=True)):
            banned = self._rules.banned(beam.token_ids)
            found += (
                _Candidate(beam.logprob + entry.logprobs[place], parent, place, entry.token_ids[place])
                for place in range(1, min(len(entry.token_ids), most + 1))
                if entry.token_ids[place] not in banned and entry.logprobs[place] > -math.inf
            )
        found.sort(key=lambda one: (-one.logprob, one.parent, one.token_id))
        return found[: self._num_wanted]

    def _forced(self, token_id: int) -> list[_Candidate]:
        """Return every live beam with a token that is certain, so it costs nothing."""
        return [_Candidate(beam.logprob, parent, _CERTAIN, token_id) for parent, beam in enumerate(self.live)]

    def _grown(self, candidate: _Candidate, entries: Sequence[TokenLogprobs]) -> Beam:
        beam, entry, place = self.live[candidate.parent], entries[candidate.parent], candidate.place
        position = TokenLogprobs(
            [candidate.token_id, *entry.token_ids[1:]],
            [0.0 if place == _CERTAIN else entry.logprobs[place], *entry.logprobs[1:]],
            max(place, 1),
        )
        tokens = [*beam.token_ids, candidate.token_id]
        return Beam(tokens, candidate.logprob, [*beam.positions, position], candidate.parent)

    def _finish(self, beams: Sequence[Beam]) -> None:
        """Rank newly ended beams together with the earlier ones."""
        for beam in beams:
            reason = "stop" if beam.token_ids[-1] in self._eos else "length"
            self.finished.append(FinishedBeam(beam, self._score(beam), reason))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self.params.beam_width :]

    def _score(self, beam: Beam) -> float:
        length = len(beam.token_ids) + self.params.num_forced_tokens
        return beam.logprob / math.pow(max(length, 1), self.params.length_penalty)

    def _may_improve(self, best_open: float, length: int) -> bool:
        """Return whether an open sequence could still be among the best."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        is_patient = params.early_stopping == "never" and params.length_penalty > 0.0
        reach = (params.max_tokens if is_patient else length) + params.num_forced_tokens
        return best_open / math.pow(reach, params.length_penalty) > self.finished[-1].score


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
    """Return the template request of a search's beams, and its parameters, after all checks against the model.

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
    return first, msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=least)


class BeamSearches(RequestOwner):
    """Front-end state of all beam searches."""

    params_type = BeamSearchParams

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        super().__init__(tokenizer)
        self._of_id: dict[str, _Search] = {}

    @property
    def num_unfinished(self) -> int:
        """Upper bound of the sequences that the searches follow."""
        return len(self._of_id) // 2

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
        """Validate and start a search; return all core ids its beams will use, and the messages to send."""
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
        """Start a search; return all core ids its beams will use, and the messages to send."""
        tokenizer = (
            self._tokenizer if prompt.tokenizer_context is None else prompt.tokenizer_context.tokenizer
        )
        search = _Search(label, prompt, first, params, sink, tokenizer, trace_headers or {})
        self._of_id.update(dict.fromkeys(search.core_ids, search))
        return search.core_ids, [add_message(search.requests())]

    def process(
        self, updates: Iterable[RequestUpdate], now: float, stats: IterationStats
    ) -> list[CoreRequest]:
        """Process a core's updates of beams; return the messages to send to it."""
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
        """End the searches of these ids with their current results; return all of their core ids."""
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
        """Return the requests with which a restarted core continues the searches."""
        return [request for search in self._found(core_ids) for request in search.unreported()]

    def fail(self, core_ids: Iterable[str], error: Exception, now: float, stats: IterationStats) -> None:
        """End the searches of these ids with this error."""
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
    """One search: the requests of its current step, and their results."""

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
        # Two alternating sets of ids: the new beams fork from the retained ones of the other set.
        self._names = [[f"{name}.{kind}{beam}" for beam in range(width)] for kind in "ab"]
        self.core_ids = [*self._names[0], *self._names[1]]
        self._entries: dict[str, TokenLogprobs] = {}
        self._num_cached_tokens = 0
        self._stats = RequestStateStats(arrival_time=first.arrival_time)

    def requests(self) -> list[EngineCoreRequest]:
        """Return one request per live beam, a fork of the beam that it continues."""
        mine, before = self._names[self._search.length % 2], self._names[(self._search.length + 1) % 2]
        wanted = max(self._search.num_candidates, self._params.logprobs)
        first = self._first.sampling_params
        params = first.replace_unchecked(max_tokens=self._search.length + 1, logprobs=wanted)
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
        """Return the requests without a result, without forks, since their parents are lost."""
        open_ones = [one for one in self.requests() if one.request_id not in self._entries]
        return [msgspec.structs.replace(one, fork_of=None) for one in open_ones]

    def apply(self, update: RequestUpdate, now: float, stats: IterationStats) -> list[CoreRequest]:
        """Process the token of a beam; the last one of a step starts the next step, or yields the output."""
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
            stats.num_prompt_tokens += len(self._prompt.given_ids)
            stats.num_cached_tokens += update.num_cached_tokens
            stats.time_to_first_token_s.append(now - mine.arrival_time)
        mine.last_token_ts = now
        mine.num_preemptions += update.num_preemptions
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
