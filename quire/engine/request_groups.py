"""A caller's request: its prompt, its sequences, and when which output goes to its sink.

Invariant: the last output of a request is `finished`, and nothing comes behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.sequence_state import OUTPUT_FAILED, SequenceState
from quire.metrics.stats import EndedRequest
from quire.outputs import CompletionOutput, RequestOutput, joined_stats
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams

Sink = Callable[[Any], None]
"""Where a request's outputs go, in order: `RequestOutput`s, or one `PoolingRequestOutput` if its prompt is pooled.

An exception (the engine died) is the last thing that it receives.
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
        """Send what the request's output kind asks for; nothing if there is nothing new."""
        first = self.sequences[0]
        is_one = len(self.sequences) == 1
        finished, kind = first.finished if is_one else self.finished, self.params.output_kind
        if not finished and self.params.stream_interval and self._gathers():
            return
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return
        delta = kind is RequestOutputKind.DELTA
        completions = [s.completion(delta) for s in self.sequences if not delta or s.has_news]
        if completions:
            self.sink(self._output(completions, finished, delta))

    def _gathers(self) -> bool:
        """Whether the request's `stream_interval` lets news wait: not the first token, nor the end of a sequence."""
        interval = self.params.stream_interval or 1
        return interval > 1 and not any(
            sequence.num_unsent >= (interval if sequence.has_begun else 1) or sequence.ends
            for sequence in self.sequences
        )

    def ended(self, now: float) -> EndedRequest:
        """What there is to tell of the request, which has finished."""
        num_tokens = [sequence.stats.num_generation_tokens for sequence in self.sequences]
        return EndedRequest(
            label=self.request_id,
            params=self.params,
            num_sequences=len(self.sequences),
            finish_reasons=[str(sequence.finish_reason) for sequence in self.sequences],
            num_prompt_tokens=len(self.prompt.token_ids),
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            num_generation_tokens=sum(num_tokens),
            max_num_generation_tokens=max(num_tokens),
            times=joined_stats([sequence.stats for sequence in self.sequences]),
            ended_ts=now,
            trace_headers=self.trace_headers,
        )

    def failure(self) -> Any:
        """The last output of a request whose outputs cannot be made: that it failed, and nothing else."""
        completions = [
            CompletionOutput(sequence.index, "", [], finish_reason="error", stop_reason=OUTPUT_FAILED)
            for sequence in self.sequences
        ]
        return RequestOutput(self.request_id, self.prompt.text, self.prompt.token_ids, completions, True)

    def _output(self, completions: list[CompletionOutput], finished: bool, delta: bool) -> RequestOutput:
        first = self.sequences[0]
        prompt_logprobs = None if delta and self.prompt_logprobs_sent else first.prompt_logprobs
        self.prompt_logprobs_sent = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            metrics=joined_stats([one.stats for one in self.sequences]) if finished else first.stats,
        )


class PooledGroup(RequestGroup):
    """A request that has one output: what is pooled of its prompt, or why there is nothing."""

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
