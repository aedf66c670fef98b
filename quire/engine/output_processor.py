"""From core updates to outputs: text, stop strings, logprobs, what was pooled, statistics.

Invariant: each sequence gets exactly one finishing update; after it (or after `end`), later updates for the
same sequence are ignored. An error of ours while one output is made ends that sequence and touches no other. Runs in
the front end; the core never sees text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from quire.engine.messages import EngineCoreOutputs, EngineCoreRequest
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.queue_limits import WaitingSequences
from quire.engine.request_groups import PooledGroup, RequestGroup, Sink
from quire.engine.sequence_state import SequenceState
from quire.engine.tokenizer import Tokenizer
from quire.metrics.stats import IterationStats

logger = logging.getLogger(__name__)

Ends = dict[str, list[str]]
"""Reason -> core ids of the sequences that end for it."""


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
        core_requests: list[EngineCoreRequest],
        sink: Sink,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Expect updates for these core requests; `request_id` is what the outputs carry."""
        tokenizer = self._tokenizer if prompt.lexicon is None else prompt.lexicon.tokenizer
        sequences = [SequenceState(index, core, tokenizer) for index, core in enumerate(core_requests)]
        pools = core_requests[0].pooling_params is not None
        group = (PooledGroup if pools else RequestGroup)(
            request_id, prompt, core_requests[0].sampling_params, sink, sequences, trace_headers or {}
        )
        for sequence in sequences:
            self._running[sequence.core_request_id] = (sequence, group)
            self.waiting.add(sequence.core_request_id, len(prompt.token_ids))

    def process(self, outputs: EngineCoreOutputs, now: float) -> tuple[Ends, IterationStats]:
        """Hand the step's news to the sinks, each as soon as it is made; making the others takes time.

        A request with several sequences has one output for all of them, which comes behind.
        Returns which sequences the core must end, because it does not know that they have (a stop string matched,
        their output could not be made), and the step's statistics.
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
        """End those of these sequences that still run. Returns them, for the core, and their statistics."""
        stats = IterationStats()
        ended = [self._running[name] for name in core_request_ids if name in self._running]
        for sequence, group in ended:
            try:
                sequence.end(reason, now, stats)
            except BaseException as error:
                _fail(sequence, error, now, stats)
            self._forget(sequence, group, now, stats)
        ends = {reason: [sequence.core_request_id for sequence, _ in ended]} if ended else Ends()
        self._publish_all([group for _, group in ended], ends, now, stats)
        return ends, stats

    def resume(self, core_request_ids: Iterable[str]) -> list[EngineCoreRequest]:
        """What a core that knows nothing must be asked for, so that those of these sequences that still run go on."""
        requests = [self._running[name][0].resume() for name in core_request_ids if name in self._running]
        for request in requests:
            self.waiting.add(request.request_id, len(request.prompt_token_ids))
        return requests

    def fail(self, core_request_ids: Iterable[str], error: Exception, now: float) -> IterationStats:
        """Requests that have any of these sequences end with this error. Returns their statistics."""
        stats = IterationStats()
        running = [self._running[name] for name in core_request_ids if name in self._running]
        for group in {id(group): group for _, group in running}.values():
            self._fail_rest(group, now, stats)
            group.sink(error)
        return stats

    def _forget(
        self, sequence: SequenceState, group: RequestGroup, now: float, stats: IterationStats
    ) -> None:
        """A sequence has finished, and its request, too, if it was the last."""
        del self._running[sequence.core_request_id]
        self.waiting.remove(sequence.core_request_id)
        if group.finished:
            stats.ended.append(group.ended(now))

    def _fail_rest(self, group: RequestGroup, now: float, stats: IterationStats) -> list[str]:
        """End what still runs of a request; returns the sequences' core ids."""
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
        """End what still runs of a request whose output could not be made."""
        if failed := self._fail_rest(group, now, stats):
            ends.setdefault("error", []).extend(failed)
        group.sink(group.failure())


def _fail(sequence: SequenceState, error: BaseException, now: float, stats: IterationStats) -> None:
    _log_unless_exit(error, sequence.core_request_id)
    sequence.fail(now, stats)


def _log_unless_exit(error: BaseException, name: str) -> None:
    """A panic of a library that is written in Rust is no `Exception`, and must not pass for one of these."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    about = {"request_id": name}
    logger.error("the output of request %s could not be made", name, exc_info=error, extra=about)
