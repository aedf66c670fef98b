"""The sampler: logits in, one token per row of them out. A row of the batch has several if it has drafts.

Invariant: a sample's token and logprobs depend on its logits, the tokens before it and its request's parameters alone,
bit for bit; every feature works sample by sample. A new way to change logits is a new class and a line in
`LOGITS_FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.plugins import FACTORY, PluginTable
from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.structured_output.settings import StructuredOutputsSettings
from quire.structured_output.store import GrammarStore
from quire.worker.devices import Transfers, moved
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.draw import Draw, StagedDraw
from quire.worker.sampler.feature import Feature, LogitsFeature
from quire.worker.sampler.grammar import GrammarMask
from quire.worker.sampler.logprobs import Logprobs, RawLogprobs, StagedLogprobs, token_logprobs
from quire.worker.sampler.masks import AllowedTokenIds, LogitBias, MinTokens
from quire.worker.sampler.penalties import Penalties

LOGITS_FEATURES: PluginTable[Callable[[InputBatch, int], LogitsFeature[Any]]] = PluginTable(
    "quire.logits_features",
    "a logits feature",
    {
        "allowed_token_ids": AllowedTokenIds,
        "min_tokens": MinTokens,
        "logit_bias": LogitBias,
        "penalties": Penalties,
    },
    FACTORY,
)
"""What may change the logits, in the order in which it does; those of plug-ins come after ours, by name, and grammars
last."""

NON_FINITE = "the model produced non-finite logits"
NO_TOKEN_LEFT = (
    "no token is left to choose from: allowed_token_ids, min_tokens, stop tokens and structured_outputs "
    "exclude all"
)

_FAILURES = {-1: NO_TOKEN_LEFT, -2: NON_FINITE}
"""What a negative code in the place of a token id means; -1 is that of `ops.sample_tokens`."""
_NON_FINITE_CODE = -2


class SamplerOutput(NamedTuple):
    """The choice for N rows."""

    token_ids: NDArray[np.int64]
    """[N]; 0 for rows in `failed`."""
    logprobs: dict[int, TokenLogprobs]
    """Index of a row that wants logprobs -> its logprobs."""
    failed: dict[int, str]
    """Index of a row that cannot go on -> the reason."""


class Sampled(NamedTuple):
    """The same as the device has it."""

    codes: Tensor
    """[N] int64: the token's id, or negative."""
    logprobs: RawLogprobs | None
    wanting: NDArray[np.int64]
    """Rows that `logprobs` are about."""
    failed: Mapping[int, str] = {}
    """Rows of which the host knows that they cannot go on."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Sampled:
        """With its tensors moved, as by `Transfers.download`."""
        logprobs = None if self.logprobs is None else moved(self.logprobs, move)
        return Sampled(move(self.codes), logprobs, self.wanting, self.failed)

    def read(self) -> SamplerOutput:
        """What it says, once it is on the host."""
        token_ids: NDArray[np.int64] = self.codes.numpy()
        failed: dict[int, str] = {}
        if token_ids.min() < 0:
            failed = {row: _FAILURES[int(token_ids[row])] for row in (token_ids < 0).nonzero()[0].tolist()}
            token_ids = token_ids.clip(0)
        failed |= self.failed
        entries = [] if self.logprobs is None else self.logprobs.entries()
        return SamplerOutput(token_ids, dict(zip(self.wanting.tolist(), entries, strict=True)), failed)


class StagedRows(NamedTuple):
    """What all features need for the rows of a step."""

    features: list[tuple[LogitsFeature[Any], Any]]
    draw: StagedDraw | None
    logprobs: StagedLogprobs | None


class Sampler:
    """Samples for the rows of a batch, which it reads and does not change; grammars are where the core keeps them."""

    def __init__(
        self, batch: InputBatch, vocab_size: int, transfers: Transfers, grammars: GrammarStore | None = None
    ) -> None:
        self._transfers = transfers
        self._logits_features = [
            *(make(batch, vocab_size) for make in LOGITS_FEATURES.resolve_all()),
            GrammarMask(batch, vocab_size, grammars or GrammarStore(StructuredOutputsSettings())),
        ]
        self._draw = Draw(batch, vocab_size, transfers.torch_device)
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

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """Whether `stage` needs these rows' sampled tokens on the host."""
        return any(feature.reads_tokens and feature.has_users(rows) for feature in self._features)

    def stage(self, samples: Samples) -> StagedRows:
        """The host's part of sampling for N samples; needs no logits, so it can run while the model computes."""
        staged = ((feature, self._staged(feature, samples)) for feature in self._logits_features)
        return StagedRows(
            features=[(feature, value) for feature, value in staged if value is not None],
            draw=self._staged(self._draw, samples),
            logprobs=self._staged(self._logprobs, samples),
        )

    def _staged(self, feature: Feature[Any], samples: Samples) -> Any:
        value = feature.stage(samples)
        return None if value is None else moved(value, self._transfers.upload)

    def sample(self, logits: Tensor, staged: StagedRows) -> Sampled:
        """Choose a token for each row; logits [N, V] float32, contiguous, may be changed in place."""
        is_bad = clear_unusable(logits)
        raw = None if staged.logprobs is None else _raw_logits(logits, staged, staged.logprobs)
        failed: dict[int, str] = {}
        for feature, value in staged.features:
            feature.apply(logits, value)
            failed.update(feature.failures(value))
        chosen = self._draw.choose(logits, staged.draw)
        codes = chosen.masked_fill(is_bad, _NON_FINITE_CODE)
        if raw is None or staged.logprobs is None:
            return Sampled(codes, None, np.zeros(0, dtype=np.int64), failed)
        about = chosen.clamp(min=0)[staged.logprobs.indices]
        logprobs = token_logprobs(raw, about, staged.logprobs.num_logprobs)
        return Sampled(codes, logprobs, staged.logprobs.rows, failed)


def clear_unusable(logits: Tensor) -> Tensor:
    """Set rows of [N, V] that `ops.unusable_rows` finds to 0; returns which, [N] bool."""
    is_bad = ops.unusable_rows(logits)
    ops.clear_rows(logits, is_bad)
    return is_bad


def _raw_logits(logits: Tensor, staged: StagedRows, wanted: StagedLogprobs) -> Tensor:
    """The logits of the rows that want logprobs; a copy only if it takes one to keep them as they are."""
    if staged.features or len(wanted.rows) < len(logits):
        return logits[wanted.indices]
    return logits
