"""The sampler: logits in, one token per row out.

Invariant: a row's token and logprobs depend on that row's logits, tokens and parameters alone, bit for bit;
every feature works row by row. A new way to change logits is a new class and a line in `LOGITS_FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.input_batch import InputBatch
from quire.worker.sampler.draw import Draw, StagedDraw
from quire.worker.sampler.feature import Feature, LogitsFeature
from quire.worker.sampler.logprobs import Logprobs, StagedLogprobs, token_logprobs
from quire.worker.sampler.masks import AllowedTokenIds, LogitBias, MinTokens
from quire.worker.sampler.penalties import Penalties

LOGITS_FEATURES: tuple[Callable[[InputBatch, int], LogitsFeature[Any]], ...] = (
    AllowedTokenIds,
    MinTokens,
    LogitBias,
    Penalties,
)
"""What may change the logits, in the order in which it does."""

NON_FINITE = "the model produced non-finite logits"
NO_TOKEN_LEFT = "no token is left to choose from: allowed_token_ids, min_tokens and stop tokens exclude all"


class SamplerOutput(NamedTuple):
    """The choice for N rows."""

    token_ids: NDArray[np.int64]
    """[N]; meaningless for rows in `failed`."""
    logprobs: dict[int, TokenLogprobs]
    """Index of a row that wants logprobs -> its logprobs."""
    failed: dict[int, str]
    """Index of a row that cannot go on -> the reason."""


class StagedRows(NamedTuple):
    """What all features need for the rows of a step."""

    features: list[tuple[LogitsFeature[Any], Any]]
    draw: StagedDraw | None
    logprobs: StagedLogprobs | None


class Sampler:
    """Samples for the rows of a batch, which it reads and does not change."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        self._logits_features = [feature(batch, vocab_size) for feature in LOGITS_FEATURES]
        self._draw = Draw(batch, vocab_size)
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

    def stage(self, rows: NDArray[np.int64]) -> StagedRows:
        """The host's part of sampling for rows [N]; needs no logits, so it can run while the model computes."""
        staged = ((feature, feature.stage(rows)) for feature in self._logits_features)
        return StagedRows(
            features=[(feature, value) for feature, value in staged if value is not None],
            draw=self._draw.stage(rows),
            logprobs=self._logprobs.stage(rows),
        )

    def sample(self, logits: Tensor, staged: StagedRows) -> SamplerOutput:
        """Choose a token for each row; logits [N, V] float32, contiguous, may be changed in place."""
        failed = dict.fromkeys(non_finite_rows(logits), NON_FINITE)
        for row in failed:
            logits[row] = 0.0
        raw = None if staged.logprobs is None else _raw_logits(logits, staged)
        for feature, value in staged.features:
            feature.apply(logits, value)
        chosen = self._draw.choose(logits, staged.draw)
        token_ids: NDArray[np.int64] = chosen.cpu().numpy()
        for row in (token_ids < 0).nonzero()[0].tolist():
            failed[row] = NO_TOKEN_LEFT
            token_ids[row] = 0
        return SamplerOutput(token_ids, _logprobs_of(raw, chosen, staged.logprobs), failed)


def non_finite_rows(logits: Tensor) -> list[int]:
    """Indices of the rows of [N, V] that hold a NaN or an infinity."""
    rows: list[int] = ops.non_finite_rows(logits).cpu().numpy().nonzero()[0].tolist()
    return rows


def _raw_logits(logits: Tensor, staged: StagedRows) -> Tensor:
    """The logits of the rows that want logprobs; a copy only if it takes one to keep them as they are."""
    assert staged.logprobs is not None
    wanting = staged.logprobs.rows
    if staged.features or len(wanting) < len(logits):
        return logits[torch.from_numpy(wanting)]
    return logits


def _logprobs_of(
    raw: Tensor | None, chosen: Tensor, staged: StagedLogprobs | None
) -> dict[int, TokenLogprobs]:
    if raw is None or staged is None:
        return {}
    values = token_logprobs(raw, chosen[torch.from_numpy(staged.rows)], staged.num_logprobs)
    return dict(zip(staged.rows.tolist(), values, strict=True))
