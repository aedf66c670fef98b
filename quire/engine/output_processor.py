"""From core updates to `RequestOutput`s: text, stop strings, logprobs, statistics.

Invariant: each sequence gets exactly one finishing update; after it (or after `abort`), later updates for the
same sequence are ignored. Runs in the front end; the core never sees text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.engine.input_processor import TokenizedPrompt
from quire.engine.messages import EngineCoreOutputs, EngineCoreRequest
from quire.engine.queue_limits import WaitingSequences
from quire.engine.sequence_state import SequenceState
from quire.engine.tokenizer import Tokenizer
from quire.metrics.stats import IterationStats
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams

Sink = Callable[[RequestOutput | Exception], None]
"""Where a request's outputs go, in order; an exception (the engine died) is the last thing it receives."""


class OutputProcessor:
    """Owns the front-end state of all requests in flight."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.waiting = WaitingSequences()
        self._running: dict[str, tuple[SequenceState, RequestGroup]] = {}

    @property
    def num_unfinished(self) -> int:
        """Sequences whose end has not been published yet."""
        return len(self._running)

    def add_request(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        core_requests: list[EngineCoreRequest],
        sink: Sink,
    ) -> None:
        """Expect updates for these core requests; `request_id` is what the outputs carry."""
        sequences = [SequenceState(index, core, self._tokenizer) for index, core in enumerate(core_requests)]
        group = RequestGroup(request_id, prompt, params, sink, sequences)
        for sequence in sequences:
            self._running[sequence.core_request_id] = (sequence, group)
            self.waiting.add(sequence.core_request_id, len(prompt.token_ids))

    def process(self, outputs: EngineCoreOutputs) -> tuple[list[str], IterationStats]:
        """Hand the step's news to the sinks.

        Returns core ids to abort (a stop string matched) and the step's statistics.
        """
        now = outputs.timestamp or time.monotonic()
        stats = IterationStats()
        to_abort: list[str] = []
        touched: list[RequestGroup] = []
        for update in outputs.updates:
            if update.request_id not in self._running:
                continue
            sequence, group = self._running[update.request_id]
            sequence.apply(update, now, stats)
            self.waiting.remove(update.request_id)
            touched.append(group)
            if sequence.finished:
                del self._running[update.request_id]
                if update.finish_reason is None:
                    to_abort.append(update.request_id)
        _publish(touched)
        return to_abort, stats

    def abort(self, core_request_ids: Iterable[str]) -> tuple[list[str], IterationStats]:
        """End these sequences with finish_reason "abort".

        Returns the core ids of those that were still running, and their statistics.
        """
        now = time.monotonic()
        stats = IterationStats()
        aborted = [self._running.pop(rid) for rid in core_request_ids if rid in self._running]
        for sequence, _ in aborted:
            sequence.abort(now, stats)
            self.waiting.remove(sequence.core_request_id)
        _publish([group for _, group in aborted])
        return [sequence.core_request_id for sequence, _ in aborted], stats

    def fail_all(self, error: Exception) -> None:
        """The core is gone: every request in flight ends with this error."""
        groups = {id(group): group for _, group in self._running.values()}
        self._running.clear()
        self.waiting.clear()
        for group in groups.values():
            group.sink(error)


def _publish(groups: list[RequestGroup]) -> None:
    for group in {id(group): group for group in groups}.values():
        group.publish()


@dataclass
class RequestGroup:
    """One caller's request: its prompt and its `n` sequences."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    sink: Sink
    sequences: list[SequenceState]
    prompt_logprobs_sent: bool = False

    def publish(self) -> None:
        """Send what the request's output kind asks for; nothing if there is nothing new."""
        finished = all(sequence.finished for sequence in self.sequences)
        kind = self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return
        delta = kind is RequestOutputKind.DELTA
        completions = [s.completion(delta) for s in self.sequences if not delta or s.has_news]
        if completions:
            self.sink(self._output(completions, finished, delta))

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
            metrics=first.stats,
        )
