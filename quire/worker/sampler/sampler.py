"""The sampler: logits in, one token per row out.

Invariant: a row's token and logprobs depend on that row's logits, tokens and parameters alone, bit for bit;
every feature works row by row. A new way to change logits is a new class and a line in `LOGITS_FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.input_batch import InputBatch
from quire.worker.sampler.draw import Draw, StagedDraw
from quire.worker.sampler.feature import Feature, LogitsFeature
from quire.worker.sampler.filters import MinP, Temperature, TopKTopP
from quire.worker.sampler.logprobs import Logprobs, token_logprobs
from quire.worker.sampler.masks import AllowedTokenIds, LogitBias, MinTokens
from quire.worker.sampler.penalties import Penalties

LOGITS_FEATURES: tuple[Callable[[InputBatch, int], LogitsFeature[Any]], ...] = (
    AllowedTokenIds,
    MinTokens,
    LogitBias,
    Penalties,
    Temperature,
    MinP,
    TopKTopP,
)
"""What may change the logits, in the order in which it does."""

NON_FINITE = "the model produced non-finite logits"
NO_TOKEN_LEFT = "no token is left to choose from: allowed_token_ids, min_tokens and stop tokens exclude all"


# Rows are sampled so many at a time that the allocator recycles the float64 and int64 copies of their logits (elements,
# 8 MiB each); larger ones would be fresh pages of the system every time, which costs more than the arithmetic.
_SLICE_ELEMENTS = 1 << 20


class SamplerOutput(NamedTuple):
    """The choice for N rows."""

    token_ids: NDArray[np.int64]
    """[N]; meaningless for rows in `failed`."""
    logprobs: dict[int, TokenLogprobs]
    """Index of a row that wants logprobs -> its logprobs."""
    failed: dict[int, str]
    """Index of a row that cannot go on -> the reason."""


class StagedRows(NamedTuple):
    """What all features need for some rows of a step."""

    rows: slice
    """Of the step's rows."""
    features: list[tuple[LogitsFeature[Any], Any]]
    draw: StagedDraw | None
    logprob_rows: NDArray[np.int64] | None
    """[U] of these rows."""
    num_logprobs: list[int]


class Sampler:
    """Samples for the rows of a batch, which it reads and does not change."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        self._slice_size = max(1, _SLICE_ELEMENTS // vocab_size)
        self._logits_features = [feature(batch, vocab_size) for feature in LOGITS_FEATURES]
        self._draw = Draw(batch)
        self._logprobs = Logprobs(batch)
        self._features: list[Feature[Any]] = [*self._logits_features, self._draw, self._logprobs]

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Take in a request that was given a row."""
        for feature in self._features:
            feature.add_request(row, request)

    def remove_request(self, row: int) -> None:
        """Forget a row."""
        for feature in self._features:
            feature.remove_request(row)

    def stage(self, rows: NDArray[np.int64]) -> list[StagedRows]:
        """The host's part of sampling for rows [N]; needs no logits, so it can run while the model computes."""
        starts = range(0, len(rows), self._slice_size)
        return [self._stage_slice(rows, slice(start, start + self._slice_size)) for start in starts]

    def sample(self, logits: Tensor, staged: list[StagedRows]) -> SamplerOutput:
        """Choose a token for each row; logits [N, V] float32, contiguous, are changed in place."""
        token_ids = np.zeros(len(logits), dtype=np.int64)
        logprobs: dict[int, TokenLogprobs] = {}
        failed: dict[int, str] = {}
        for part in staged:
            output = self._sample_slice(logits[part.rows], part)
            token_ids[part.rows] = output.token_ids
            logprobs |= {part.rows.start + row: entry for row, entry in output.logprobs.items()}
            failed |= {part.rows.start + row: reason for row, reason in output.failed.items()}
        return SamplerOutput(token_ids, logprobs, failed)

    def _stage_slice(self, all_rows: NDArray[np.int64], part: slice) -> StagedRows:
        rows = all_rows[part]
        staged = ((feature, feature.stage(rows)) for feature in self._logits_features)
        wanting = self._logprobs.stage(rows)
        return StagedRows(
            rows=part,
            features=[(feature, value) for feature, value in staged if value is not None],
            draw=self._draw.stage(rows),
            logprob_rows=wanting,
            num_logprobs=[] if wanting is None else self._logprobs.num_logprobs(rows[wanting]),
        )

    def _sample_slice(self, logits: Tensor, staged: StagedRows) -> SamplerOutput:
        failed = dict.fromkeys(non_finite_rows(logits), NON_FINITE)
        for row in failed:
            logits[row] = 0.0
        raw = None if staged.logprob_rows is None else logits[staged.logprob_rows]  # a copy
        for feature, value in staged.features:
            feature.apply(logits, value)
        chosen = self._draw.choose(logits, staged.draw)
        for row in np.flatnonzero(np.isneginf(logits.gather(1, chosen[:, None]).numpy()[:, 0])).tolist():
            failed[row] = NO_TOKEN_LEFT
        return SamplerOutput(chosen.numpy(), _logprobs_of(raw, chosen, staged), failed)


def non_finite_rows(logits: Tensor) -> list[int]:
    """Indices of the rows of [N, V] that hold a NaN or an infinity."""
    # The sum is far cheaper than looking at every element. It can overflow for huge finite logits: look again
    # then.
    suspects: list[int] = np.flatnonzero(~np.isfinite(logits.sum(1).numpy())).tolist()
    return [row for row in suspects if not logits[row].isfinite().all()]


def _logprobs_of(raw: Tensor | None, chosen: Tensor, staged: StagedRows) -> dict[int, TokenLogprobs]:
    if raw is None or staged.logprob_rows is None:
        return {}
    values = token_logprobs(raw, chosen[staged.logprob_rows], staged.num_logprobs)
    return dict(zip(staged.logprob_rows.tolist(), values, strict=True))
