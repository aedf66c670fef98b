"""One sequence as its caller sees it: tokens, text, logprobs and times so far.

Invariant: text is only ever appended; once `finished` is set nothing changes any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from quire.engine.detokenizer import IncrementalDetokenizer, make_stop_checker
from quire.engine.messages import EngineCoreRequest
from quire.engine.tokenizer import Tokenizer
from quire.metrics.stats import FinishedRequestStats, IterationStats
from quire.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    PositionLogprobs,
    Positions,
    PromptPositions,
    RequestStateStats,
)
from quire.scheduler.output import Pooled, RequestUpdate, TokenLogprobs

OUTPUT_FAILED = "the engine failed while it made the output"
"""Why a sequence ended that the front end could not go on with; its log has the rest."""


class SequenceState:
    """Builds the `CompletionOutput` of one core request, and remembers what of it has been sent."""

    def __init__(self, index: int, core_request: EngineCoreRequest, tokenizer: Tokenizer | None) -> None:
        params = core_request.sampling_params
        self.core_request_id = core_request.request_id
        self.index = index
        self._core_request = core_request
        self.finished = False
        self.num_cached_tokens = 0
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
        """Whether `completion` has returned a token."""
        return self._num_sent_tokens > 0

    @property
    def has_news(self) -> bool:
        return self.num_unsent > 0 or self.ends

    @property
    def ends(self) -> bool:
        """Whether its end is news."""
        return self.finished and not self._sent_finish

    @property
    def finish_reason(self) -> str | None:
        return self._finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self._stop_reason

    def apply(self, update: RequestUpdate, now: float, stats: IterationStats) -> None:
        """Take in one update of the core."""
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
            self._end("stop", self._stop.matched)
        elif update.finish_reason is not None:
            self._end(update.finish_reason, update.error or update.stop_reason)
            self._refused = update.refused
        if self.finished:
            stats.finished.append(self._finished_stats(now))

    def end(self, reason: str, now: float, stats: IterationStats) -> None:
        """Close the sequence from outside: its caller wants no more of it, or its time is over."""
        self._end(reason, None)
        stats.finished.append(self._finished_stats(now))

    def fail(self, now: float, stats: IterationStats) -> None:
        """Close the sequence because its output could not be made; it keeps what it has."""
        self.finished, self._finish_reason, self._stop_reason = True, "error", OUTPUT_FAILED
        stats.finished.append(self._finished_stats(now))

    def resume(self) -> EngineCoreRequest:
        """What a new core must be asked for after the old one is gone: to go on after the tokens so far.

        Logprobs of the prompt are complete once there is a token, and begin anew if there is none.
        """
        request, params = self._core_request, self._core_request.sampling_params
        if self._token_ids and params.prompt_logprobs is not None:
            params = params.settled(prompt_logprobs=None)
        else:
            self._begin_prompt_logprobs()
        return msgspec.structs.replace(
            request, sampling_params=params, output_token_ids=list(self._token_ids)
        )

    def _begin_prompt_logprobs(self) -> None:
        """The first token of a prompt has no logprob."""
        if self._params.prompt_logprobs is not None:
            self.prompt_logprobs = FlatLogprobs() if self._params.flat_logprobs else []
            self.prompt_logprobs.append(None)

    def _end(self, reason: str, stop_reason: int | str | None) -> None:
        """Close the sequence: held-back text is released unless a stop string cut it."""
        if self._stop.matched is None:
            rest = self._detokenizer.flush() if self._detokenizer else ""
            self._text += self._stop.push(rest, armed=self._armed) + self._stop.flush()
        if self._stop.matched is not None:
            reason, stop_reason = "stop", self._stop.matched
        self.finished, self._finish_reason, self._stop_reason = True, reason, stop_reason

    def completion(self, delta: bool) -> CompletionOutput:
        """The sequence so far, or only what `completion` has not returned yet."""
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
            self._append_plainly(update)
        else:
            self._append_one_by_one(update)

    def _append_plainly(self, update: RequestUpdate) -> None:
        """Tokens that nothing but the core can end."""
        token_ids = update.new_token_ids
        self._token_ids += token_ids
        if self._detokenizer is not None and token_ids:
            self._text += self._detokenizer.push(token_ids[:-1] if self._is_silent(update) else token_ids)

    def _is_silent(self, update: RequestUpdate) -> bool:
        """Whether the last token, which ended generation (end of sequence or a stop id), is reported but is no text."""
        return update.finish_reason == "stop" and not self._params.include_stop_str_in_output

    def _append_one_by_one(self, update: RequestUpdate) -> None:
        entries: Sequence[TokenLogprobs | None] = update.logprobs or [None] * len(update.new_token_ids)
        num_with_text = len(update.new_token_ids) - self._is_silent(update)
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
            # Tokens of one step were generated one after the other, at equal intervals as far as can be measured. So
            # the histogram counts every token, and its sum is the decode time, where vLLM has one entry per step.
            stats.inter_token_s += [(now - mine.last_token_ts) / count] * count
        mine.last_token_ts = now
        mine.num_generation_tokens += count
        stats.num_generation_tokens += count

    def _record_prompt(self, now: float, stats: IterationStats) -> None:
        """All of it is computed. It counts once, however many completions it has."""
        self.stats.first_token_ts = now
        if self._core_request.fork_of is None:
            stats.num_prompt_tokens += self._num_prompt_tokens
            stats.num_cached_tokens += self.num_cached_tokens

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
    """A position's logprobs as callers see them; `bytes_of` gives what a token would add to the text there."""
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
