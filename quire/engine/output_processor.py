# SPDX-License-Identifier: Apache-2.0
"""Output processor: core updates to text, stop strings, logprobs, pooled output and statistics.

Invariant: each sequence gets exactly one finishing update; later updates for it are ignored. An internal error while
one output is made ends that sequence and touches no other. Runs in the front end; the core never sees text.

`RequestGroup`: the last output of a request is `finished`, and nothing follows it.
`SequenceState`: text is only ever appended; once `finished` is set nothing changes any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from quire.engine.detokenizer import IncrementalDetokenizer
from quire.engine.messages import EngineCoreOutputs, EngineCoreRequest
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.queue_limits import WaitingSequences
from quire.engine.special_stops import make_stop_checker
from quire.engine.tokenizer import Tokenizer
from quire.metrics.stats import EndedRequest, FinishedRequestStats, IterationStats
from quire.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    PositionLogprobs,
    Positions,
    PromptPositions,
    RequestOutput,
    RequestStateStats,
    joined_stats,
)
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.output import Pooled, RequestUpdate, TokenLogprobs

logger = logging.getLogger(__name__)

# Stop reason of a sequence whose output failed; details are in the front end's log.
OUTPUT_FAILED = "the engine failed while it made the output"


class SequenceState:
    """Builder of the `CompletionOutput` of one core request, with the position sent so far."""

    def __init__(self, index: int, core_request: EngineCoreRequest, tokenizer: Tokenizer | None) -> None:
        params = core_request.sampling_params
        self.core_request_id = core_request.request_id
        self.index = index
        self._core_request = core_request
        self.finished = False
        self.num_cached_tokens = 0
        self.num_stored_tokens = 0
        self.kv_transfer_params: dict[str, Any] | None = None
        self.prompt_logprobs: PromptPositions | None = None
        self.pooled: Pooled | None = None
        self.stats = RequestStateStats(arrival_time=core_request.arrival_time)
        self._num_prompt_tokens = len(core_request.prompt_token_ids)
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = _make_detokenizer(tokenizer, core_request)
        self._stop = make_stop_checker(
            tokenizer,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_in_output=params.include_stop_str_in_output,
        )
        self._token_ids: list[int] = []
        self._logprobs: Positions | None = None
        self._text = ""
        self._cumulative_logprob = 0.0
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._refused = False
        self._num_sent_tokens = 0
        self._num_sent_chars = 0
        self._sent_finish = False
        if params.wants_logprobs:
            self._logprobs = FlatLogprobs() if params.flat_logprobs else []
        self._begin_prompt_logprobs()

    @property
    def num_unsent(self) -> int:
        """Tokens that `completion` has not returned yet."""
        return len(self._token_ids) - self._num_sent_tokens

    @property
    def has_begun(self) -> bool:
        """True if `completion` has returned a token."""
        return self._num_sent_tokens > 0

    @property
    def has_unsent(self) -> bool:
        return self.num_unsent > 0 or self.ends

    @property
    def ends(self) -> bool:
        """True if the finish has not been sent yet."""
        return self.finished and not self._sent_finish

    @property
    def finish_reason(self) -> str | None:
        return self._finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self._stop_reason

    def apply(self, update: RequestUpdate, now: float, stats: IterationStats) -> None:
        """Apply one update of the core."""
        self._record_history(update)
        if update.prompt_logprobs and self.prompt_logprobs is not None:
            bytes_of = self._tokenizer.token_bytes if self._tokenizer and self._params.detokenize else None
            self.prompt_logprobs.extend(position_of(entry, bytes_of) for entry in update.prompt_logprobs)
            assert len(self.prompt_logprobs) <= self._num_prompt_tokens
        num_known = len(self._token_ids)
        self._append_tokens(update)
        if len(self._token_ids) > num_known:
            self._record_tokens(len(self._token_ids) - num_known, now, stats)
        if update.pooled is not None:
            self.pooled = update.pooled
            self._record_prompt(now, stats)
            self.stats.last_token_ts = now
        if self._stop.matched is not None:
            self._finish("stop", self._stop.matched)
        elif update.finish_reason is not None:
            self._finish(update.finish_reason, update.error or update.stop_reason)
            self._refused = update.refused
        if self.finished:
            stats.finished.append(self._finished_stats(now))

    def finish(self, reason: str, now: float, stats: IterationStats) -> None:
        """Finish the sequence from outside: abort or timeout."""
        self._finish(reason, None)
        stats.finished.append(self._finished_stats(now))

    def fail(self, now: float, stats: IterationStats) -> None:
        """Finish the sequence because its output could not be made; it keeps what it has."""
        self.finished, self._finish_reason, self._stop_reason = True, "error", OUTPUT_FAILED
        stats.finished.append(self._finished_stats(now))

    def resume(self) -> EngineCoreRequest:
        """Return the request with which a replacement core continues after the tokens so far.

        Prompt logprobs are complete once there is a token, and start over if there is none.
        """
        request, params = self._core_request, self._core_request.sampling_params
        if self._token_ids and params.prompt_logprobs is not None:
            params = params.replace_unchecked(prompt_logprobs=None)
        else:
            self._begin_prompt_logprobs()
        return msgspec.structs.replace(
            request, sampling_params=params, output_token_ids=list(self._token_ids)
        )

    def _begin_prompt_logprobs(self) -> None:
        """Start prompt logprobs; the first prompt token has none."""
        if self._params.prompt_logprobs is not None:
            self.prompt_logprobs = FlatLogprobs() if self._params.flat_logprobs else []
            self.prompt_logprobs.append(None)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        """Finish the sequence: held-back text is released unless a stop string cut it."""
        if self._stop.matched is None:
            rest = self._detokenizer.flush() if self._detokenizer else ""
            self._text += self._stop.push(rest, armed=self._armed) + self._stop.flush()
        if self._stop.matched is not None:
            reason, stop_reason = "stop", self._stop.matched
        self.finished, self._finish_reason, self._stop_reason = True, reason, stop_reason

    def completion(self, delta: bool) -> CompletionOutput:
        """Return the sequence so far, or with `delta` only what `completion` has not returned yet."""
        first_token = self._num_sent_tokens if delta else 0
        first_char = self._num_sent_chars if delta else 0
        self._num_sent_tokens, self._num_sent_chars = len(self._token_ids), len(self._text)
        self._sent_finish = self.finished
        return CompletionOutput(
            index=self.index,
            text=self._text[first_char:],
            token_ids=self._token_ids[first_token:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            refused=self._refused,
        )

    @property
    def _armed(self) -> bool:
        return len(self._token_ids) >= self._params.min_tokens

    def _append_tokens(self, update: RequestUpdate) -> None:
        if self._logprobs is None and not self._params.stop:
            self._append_without_stops(update)
        else:
            self._append_one_by_one(update)

    def _append_without_stops(self, update: RequestUpdate) -> None:
        """Append tokens without logprobs and stop strings."""
        token_ids = update.new_token_ids
        self._token_ids += token_ids
        if self._detokenizer is not None and token_ids:
            self._text += self._detokenizer.push(
                token_ids[:-1] if self._ends_without_text(update) else token_ids
            )

    def _ends_without_text(self, update: RequestUpdate) -> bool:
        """Return whether the last token, which ended generation (EOS or a stop id), is reported but has no text."""
        return update.finish_reason == "stop" and not self._params.include_stop_str_in_output

    def _append_one_by_one(self, update: RequestUpdate) -> None:
        entries: Sequence[TokenLogprobs | None] = update.logprobs or [None] * len(update.new_token_ids)
        num_with_text = len(update.new_token_ids) - self._ends_without_text(update)
        # Token by token, because a stop string ends the sequence at the token that completes it.
        for place, (token_id, entry) in enumerate(zip(update.new_token_ids, entries, strict=True)):
            self._token_ids.append(token_id)
            if entry is not None and self._logprobs is not None:
                bytes_of = self._detokenizer.bytes_of if self._detokenizer else None
                self._logprobs.append(position_of(entry, bytes_of))
                self._cumulative_logprob += entry.logprobs[0]
            if self._detokenizer is not None and place < num_with_text:
                text, hidden = self._detokenizer.push([token_id]), self._detokenizer.hidden_text(token_id)
                self._text += self._stop.push(text, hidden, armed=self._armed)
            if self._stop.matched is not None:
                return

    def _record_history(self, update: RequestUpdate) -> None:
        mine = self.stats
        if update.scheduled_ts and not mine.scheduled_ts:
            mine.queued_ts, mine.scheduled_ts = update.queued_ts, update.scheduled_ts
            self.num_cached_tokens = update.num_cached_tokens
            self.num_stored_tokens = update.num_stored_tokens
        if update.kv_offer is not None:
            self.kv_transfer_params = update.kv_offer.as_params()
        if update.num_preemptions > mine.num_preemptions:
            mine.num_preemptions = update.num_preemptions
        mine.num_draft_tokens += update.num_draft_tokens
        mine.num_accepted_tokens += update.num_accepted_tokens

    def _record_tokens(self, count: int, now: float, stats: IterationStats) -> None:
        mine = self.stats
        if not mine.first_token_ts:
            self._record_prompt(now, stats)
            stats.time_to_first_token_s.append(now - mine.arrival_time)
        else:
            # Tokens of one plan were generated one after the other, at equal intervals as far as is known. So the
            # histogram counts every token, and its sum is the decode time, where vLLM has one entry per plan.
            stats.inter_token_s += [(now - mine.last_token_ts) / count] * count
        mine.last_token_ts = now
        mine.num_generation_tokens += count
        stats.num_generation_tokens += count

    def _record_prompt(self, now: float, stats: IterationStats) -> None:
        """Count the computed prompt once, however many completions it has."""
        self.stats.first_token_ts = now
        if self._core_request.fork_of is None:
            stats.num_prompt_tokens += self._num_prompt_tokens
            stats.num_cached_tokens += self.num_cached_tokens
            stats.num_stored_tokens += self.num_stored_tokens

    def _finished_stats(self, now: float) -> FinishedRequestStats:
        times = self.stats
        started = times.scheduled_ts or now
        first = times.first_token_ts or now
        return FinishedRequestStats(
            finish_reason=self._finish_reason or "abort",
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=times.num_generation_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=times.num_preemptions,
            max_tokens=self._params.max_tokens,
            e2e_s=now - times.arrival_time,
            queue_s=max(0.0, started - times.arrival_time),
            prefill_s=max(0.0, first - started),
            decode_s=max(0.0, now - first),
            tenant=self._core_request.tenant,
            is_fork=self._core_request.fork_of is not None,
            is_pooled=self.pooled is not None,
        )


def _make_detokenizer(
    tokenizer: Tokenizer | None, request: EngineCoreRequest
) -> IncrementalDetokenizer | None:
    params = request.sampling_params
    if tokenizer is None or not params.detokenize:
        return None
    return IncrementalDetokenizer(
        tokenizer,
        request.prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        shown=params.shown_special_token_ids,
    )


def position_of(entry: TokenLogprobs, bytes_of: Callable[[int], bytes] | None) -> PositionLogprobs:
    """Return a position's logprobs for callers; `bytes_of` returns what a token would add to the text there."""
    position: PositionLogprobs = {}
    ranks = entry.ranks or range(1, len(entry.token_ids))
    for place, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id not in position:
            position[token_id] = _logprob(
                logprob, entry.rank if place == 0 else ranks[place - 1], token_id, bytes_of
            )
    return position


def _logprob(logprob: float, rank: int, token_id: int, bytes_of: Callable[[int], bytes] | None) -> Logprob:
    if bytes_of is None:
        return Logprob(logprob, rank)
    token_bytes = bytes_of(token_id)
    return Logprob(logprob, rank, token_bytes.decode(errors="replace"), token_bytes)


Sink = Callable[[Any], None]
"""Receiver of a request's outputs in order: `RequestOutput`s, or one `PoolingRequestOutput`.

An exception (the engine died) is the last item that it receives.
"""
NOTHING = np.zeros(0, np.float32)


@dataclass
class RequestGroup:
    """One caller's request: its prompt and its `n` sequences."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    sink: Sink
    sequences: list[SequenceState]
    trace_headers: Mapping[str, str]
    prompt_logprobs_sent: bool = False

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    def publish(self) -> None:
        """Send an output according to the request's output kind, if there is anything new."""
        first = self.sequences[0]
        is_one = len(self.sequences) == 1
        finished, kind = first.finished if is_one else self.finished, self.params.output_kind
        if not finished and self.params.stream_interval and self._defers():
            return
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return
        delta = kind is RequestOutputKind.DELTA
        completions = [s.completion(delta) for s in self.sequences if not delta or s.has_unsent]
        if completions:
            self.sink(self._output(completions, finished, delta))

    def _defers(self) -> bool:
        """Return whether `stream_interval` defers output: not for the first token, nor at a sequence's end."""
        interval = self.params.stream_interval or 1
        return interval > 1 and not any(
            sequence.num_unsent >= (interval if sequence.has_begun else 1) or sequence.ends
            for sequence in self.sequences
        )

    def ended(self, now: float) -> EndedRequest:
        """Return the statistics of a finished request."""
        num_tokens = [sequence.stats.num_generation_tokens for sequence in self.sequences]
        return EndedRequest(
            label=self.request_id,
            params=self.params,
            num_sequences=len(self.sequences),
            finish_reasons=[str(sequence.finish_reason) for sequence in self.sequences],
            num_prompt_tokens=len(self.prompt.given_ids),
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            num_generation_tokens=sum(num_tokens),
            max_num_generation_tokens=max(num_tokens),
            times=joined_stats([sequence.stats for sequence in self.sequences]),
            ended_ts=now,
            trace_headers=self.trace_headers,
        )

    def failure(self) -> Any:
        """Return the last output of a request whose outputs cannot be made; it only reports the failure."""
        completions = [
            CompletionOutput(sequence.index, "", [], finish_reason="error", stop_reason=OUTPUT_FAILED)
            for sequence in self.sequences
        ]
        return RequestOutput(self.request_id, self.prompt.text, self.prompt.given_ids, completions, True)

    def _output(self, completions: list[CompletionOutput], finished: bool, delta: bool) -> RequestOutput:
        first = self.sequences[0]
        prompt_logprobs = None if delta and self.prompt_logprobs_sent else first.prompt_logprobs
        self.prompt_logprobs_sent = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.given_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            # An encoder's output fills whole blocks, and so more positions than its text has tokens.
            num_cached_tokens=min(first.num_cached_tokens, len(self.prompt.given_ids)),
            metrics=joined_stats([one.stats for one in self.sequences]) if finished else first.stats,
            num_stored_tokens=first.num_stored_tokens,
            kv_transfer_params=first.kv_transfer_params,
        )


class PoolingRequestGroup(RequestGroup):
    """Pooling request with one output: the pooled prompt, or the reason of its failure."""

    def publish(self) -> None:
        (sequence,) = self.sequences
        if sequence.finished:
            self.sink(self._pooled(sequence, str(sequence.finish_reason), sequence.stop_reason))

    def failure(self) -> Any:
        (sequence,) = self.sequences
        return self._pooled(sequence, "error", OUTPUT_FAILED)

    def _pooled(
        self, sequence: SequenceState, reason: str, why: int | str | None
    ) -> PoolingRequestOutput[PoolingOutput]:
        numbers = NOTHING if sequence.pooled is None or reason != "stop" else sequence.pooled.array()
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(numbers),
            prompt_token_ids=self.prompt.token_ids,
            num_cached_tokens=sequence.num_cached_tokens,
            prompt=self.prompt.text,
            finish_reason=reason,
            stop_reason=why,
            metrics=sequence.stats,
        )


Ends = dict[str, list[str]]  # Reason -> core ids of the sequences that finish for it.


class OutputProcessor:
    """Owner of the front-end state of all requests in flight."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.waiting = WaitingSequences()
        self._running: dict[str, tuple[SequenceState, RequestGroup]] = {}

    @property
    def num_unfinished(self) -> int:
        """Sequences whose finish has not been published yet."""
        return len(self._running)

    def add_request(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        core_requests: list[EngineCoreRequest],
        sink: Sink,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Register core requests before their updates arrive; outputs carry `request_id`."""
        tokenizer = (
            self._tokenizer if prompt.tokenizer_context is None else prompt.tokenizer_context.tokenizer
        )
        sequences = [SequenceState(index, core, tokenizer) for index, core in enumerate(core_requests)]
        pools = core_requests[0].pooling_params is not None
        group = (PoolingRequestGroup if pools else RequestGroup)(
            request_id, prompt, core_requests[0].sampling_params, sink, sequences, trace_headers or {}
        )
        for sequence in sequences:
            self._running[sequence.core_request_id] = (sequence, group)
            self.waiting.add(sequence.core_request_id, len(prompt.token_ids))

    def process(self, outputs: EngineCoreOutputs, now: float) -> tuple[Ends, IterationStats]:
        """Send a step's outputs to the sinks, each as soon as it is made.

        A request with several sequences has one output for all of them, sent last. Returns sequences that the core
        must abort because they finished here (stop string or output failure), and the step's statistics.
        """
        stats, ends, touched = IterationStats(), Ends(), list[RequestGroup]()
        for update in outputs.updates:
            if (found := self._running.get(update.request_id)) is None:
                continue
            sequence, group = found
            try:
                sequence.apply(update, now, stats)
            except BaseException as error:
                _fail(sequence, error, now, stats)
            self.waiting.remove(update.request_id)
            if sequence.finish_reason is not None:
                self._forget(sequence, group, now, stats)
                if update.finish_reason is None:
                    ends.setdefault(sequence.finish_reason, []).append(update.request_id)
            if len(group.sequences) == 1:
                self._publish(group, ends, now, stats)
            else:
                touched.append(group)
        self._publish_all(touched, ends, now, stats)
        return ends, stats

    def end(self, core_request_ids: Iterable[str], reason: str, now: float) -> tuple[Ends, IterationStats]:
        """Finish the running ones among these sequences; returns them, for the core, and their statistics."""
        stats = IterationStats()
        ended = [self._running[name] for name in core_request_ids if name in self._running]
        for sequence, group in ended:
            try:
                sequence.finish(reason, now, stats)
            except BaseException as error:
                _fail(sequence, error, now, stats)
            self._forget(sequence, group, now, stats)
        ends = {reason: [sequence.core_request_id for sequence, _ in ended]} if ended else Ends()
        self._publish_all([group for _, group in ended], ends, now, stats)
        return ends, stats

    def resume(self, core_request_ids: Iterable[str]) -> list[EngineCoreRequest]:
        """Return the requests with which a replacement core continues the running ones among these sequences."""
        requests = [self._running[name][0].resume() for name in core_request_ids if name in self._running]
        for request in requests:
            self.waiting.add(request.request_id, len(request.prompt_token_ids))
        return requests

    def fail(self, core_request_ids: Iterable[str], error: Exception, now: float) -> IterationStats:
        """Fail the requests of these sequences with this error; returns their statistics."""
        stats = IterationStats()
        running = [self._running[name] for name in core_request_ids if name in self._running]
        for group in {id(group): group for _, group in running}.values():
            self._fail_rest(group, now, stats)
            group.sink(error)
        return stats

    def _forget(
        self, sequence: SequenceState, group: RequestGroup, now: float, stats: IterationStats
    ) -> None:
        """Remove a finished sequence, and record its request if it was the last."""
        del self._running[sequence.core_request_id]
        self.waiting.remove(sequence.core_request_id)
        if group.finished:
            stats.ended.append(group.ended(now))

    def _fail_rest(self, group: RequestGroup, now: float, stats: IterationStats) -> list[str]:
        """Fail a request's running sequences; returns their core ids."""
        rest = [one for one in group.sequences if one.core_request_id in self._running]
        for sequence in rest:
            sequence.fail(now, stats)
            self._forget(sequence, group, now, stats)
        return [one.core_request_id for one in rest]

    def _publish_all(self, groups: list[RequestGroup], ends: Ends, now: float, stats: IterationStats) -> None:
        for group in {id(group): group for group in groups}.values():
            self._publish(group, ends, now, stats)

    def _publish(self, group: RequestGroup, ends: Ends, now: float, stats: IterationStats) -> None:
        try:
            group.publish()
        except BaseException as error:
            _log_unless_exit(error, group.request_id)
            self._drop(group, ends, now, stats)

    def _drop(self, group: RequestGroup, ends: Ends, now: float, stats: IterationStats) -> None:
        """Fail a request whose output could not be made."""
        if failed := self._fail_rest(group, now, stats):
            ends.setdefault("error", []).extend(failed)
        group.sink(group.failure())


def _fail(sequence: SequenceState, error: BaseException, now: float, stats: IterationStats) -> None:
    _log_unless_exit(error, sequence.core_request_id)
    sequence.fail(now, stats)


def _log_unless_exit(error: BaseException, name: str) -> None:
    """Log an error; panics of Rust libraries are no `Exception`, so only exits are re-raised."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    about = {"request_id": name}
    logger.error("the output of request %s could not be made", name, exc_info=error, extra=about)
