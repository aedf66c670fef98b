"""Logits processors of the operator and of requests (`quire.logits_processors`), one row at a time.

Invariant: what a processor does wrong, an exception or numbers that are none, costs the request that it was called for,
and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import FOREIGN_WORDS
from quire.logits_processors import LogitsProcessor, RequestLogitsProcessor
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import Failures, LogitsFeature

logger = logging.getLogger(__name__)


class _Call(NamedTuple):
    """What is to be done for one sample."""

    sample: int
    processors: list[RequestLogitsProcessor]
    prompt_ids: list[int]
    output_ids: list[int]


class StagedCalls(NamedTuple):
    calls: list[_Call]


class CustomProcessors(LogitsFeature[StagedCalls]):
    """Those of the engine, in the order in which they are named, and then those of the request."""

    reads_tokens = True

    def __init__(
        self, batch: InputBatch, vocab_size: int, processors: Sequence[LogitsProcessor] = ()
    ) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._engine_wide = processors
        self._processors: dict[int, list[RequestLogitsProcessor]] = {}

    def wants(self, params: SamplingParams) -> bool:
        return bool(self._engine_wide or params.logits_processors)

    def _store(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        found = [_of_request(processor, params) for processor in self._engine_wide]
        own = list(params.logits_processors)
        self._processors[row] = [*(one for one in found if one is not None), *own]

    def _forget(self, row: int) -> None:
        del self._processors[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedCalls | None:
        calls = []
        for sample in users.tolist():
            row, column = int(samples.rows[sample]), int(samples.columns[sample])
            processors, num_prompt = self._processors[row], int(self._batch.num_prompt_tokens[row])
            if processors:
                tokens = self._batch.token_ids[row, :column].tolist()
                calls.append(_Call(sample, processors, tokens[:num_prompt], tokens[num_prompt:]))
        return StagedCalls(calls) if calls else None

    def apply(self, logits: Tensor, staged: StagedCalls) -> Failures | None:
        failures: Failures = {}
        for call in staged.calls:
            row = logits[call.sample]
            failure = _run(call, row)
            if failure is not None:
                failures[call.sample] = failure
                row.zero_()
        return failures or None


def _of_request(processor: LogitsProcessor, params: SamplingParams) -> RequestLogitsProcessor | None:
    """What a processor wants to be called for a request; its error is raised when it would be called."""
    try:
        return processor.for_request(params)
    except Exception as error:
        cause = error

        def fail(_prompt_ids: list[int], _output_ids: list[int], _logits: Tensor) -> None:
            raise cause

        return fail


def _run(call: _Call, row: Tensor) -> str | None:
    """Call all processors of a sample on its logits [V]; returns why it cannot go on."""
    for processor in call.processors:
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        try:
            changed = processor(list(call.prompt_ids), list(call.output_ids), row)
            if changed is not None and changed is not row:
                if changed.shape != row.shape:
                    raise ValueError(f"it returned logits of shape {tuple(changed.shape)}")
                row.copy_(changed)
        except Exception as error:
            logger.exception("the logits processor %s failed", name)
            return f"the logits processor {name} failed{FOREIGN_WORDS}{type(error).__name__}: {error}"
        highest = row.amax().item()
        if not highest < np.inf:  # a maximum hands on a NaN
            return f"the logits processor {name} made logits that are no numbers"
    return None
