# SPDX-License-Identifier: Apache-2.0
"""Sampler: logits in, one token per row of them out. A batch row with drafts has several rows of logits.

Invariant: a sample's token and logprobs depend bit for bit only on its logits, the tokens before it and its request's
parameters; every feature works sample by sample. A new way to change logits is a new class and a line in
`LOGITS_FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.kernels.attention_metadata import NO_LIMITS, SamplingLimits
from quire.kernels.reference_sampling import shaped_at_once, shaped_logits
from quire.logits_processors import LogitsProcessor
from quire.plugins import FACTORY, PluginTable
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.chain import SamplerChain, neutral_settings
from quire.worker.sampler.dry import Dry
from quire.worker.sampler.feature import Failures, Feature, LogitsFeature
from quire.worker.sampler.logprobs import Logprobs, LogprobsMode, RawLogprobs, StagedLogprobs
from quire.worker.sampler.masks import (
    AllowedTokenIds,
    BadWords,
    CustomProcessors,
    LogitBias,
    MinTokens,
    ThinkingBudget,
)
from quire.worker.sampler.penalties import DevicePenalties, WindowedPenalties, make_penalties
from quire.worker.transfers import Transfers, moved


class StagedDraw(NamedTuple):
    """Arguments of `ops.sample_tokens` besides the logits, for all N samples."""

    settings: Tensor
    keys: Tensor | None
    limits: SamplingLimits

    def num_deciding(self) -> int:
        """Return the number of top tokens that decide the draw of each row; the others change nothing.

        Without top-k all do: top-p refers to the mass of all, and min-p may leave any number. The settings must be on
        the host.
        """
        temperature, top_k = self.settings[:, 0], self.settings[:, 2]
        return int(top_k.where(temperature != 0.0, 1.0).max())


def greedy_settings(vocab_size: int) -> tuple[float, float, float, float]:
    """Return the settings of a greedy row."""
    return 0.0, -np.inf, float(vocab_size), 1.0


class RandomDraw(Feature[StagedDraw]):
    """Random sampling with temperature, min-p, top-k and top-p; rows that do not use it are greedy.

    Invariant: a random row's token is a function of its own logits, its settings and (seed, output index). The
    settings are those of `ops.sample_tokens`.
    """

    def __init__(self, batch: InputBatch, vocab_size: int, device: torch.device) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._vocab_size = vocab_size
        self._greedy = greedy_settings(vocab_size)
        self._settings = np.tile(np.array(self._greedy), (batch.max_num_seqs, 1))
        self._seeds = np.zeros(batch.max_num_seqs, dtype=np.int64)
        greedy = torch.from_numpy(self._settings.copy()).to(device)
        self._greedy_rows = StagedDraw(greedy, None, NO_LIMITS)

    def wants(self, params: SamplingParams) -> bool:
        return not params.greedy

    def _store(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        assert params.seed is not None, "the front end seeds every random request"
        self._seeds[row] = params.seed
        if params.has_sampler_chain:  # the chain has shaped the logits already
            self._settings[row] = neutral_settings(self._vocab_size)
            return
        log_min_p = np.log(params.min_p) if params.min_p > 0.0 else -np.inf
        top_k = min(params.top_k or self._vocab_size, self._vocab_size)
        self._settings[row] = params.temperature, log_min_p, top_k, params.top_p

    def _forget(self, row: int) -> None:
        self._settings[row] = self._greedy

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedDraw:
        settings = self.settings(samples.rows)
        return StagedDraw(
            torch.from_numpy(settings),
            torch.from_numpy(self.keys(samples)),
            SamplingLimits(*(settings[:, 1:] != self._greedy[1:]).any(0).tolist()),
        )

    def settings(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the settings [N, 4] of rows [N]."""
        settings: NDArray[np.float64] = self._settings[rows]
        return settings

    def keys(self, samples: Samples) -> NDArray[np.int64]:
        """Return [N, 2] seed and output index of each sample."""
        return np.stack((self._seeds[samples.rows], self._batch.output_indices(samples)), axis=1)

    def choose(self, logits: Tensor, staged: StagedDraw | None) -> Tensor:
        """Map logits [N, V] to token ids [N] int64, -1 where no token is left."""
        settings, keys, limits = staged or self._all_greedy(len(logits))
        return ops.sample_tokens(logits, settings[: len(logits)], keys, limits)

    def _all_greedy(self, num_samples: int) -> StagedDraw:
        """Return settings of at least so many greedy samples; with drafts these may exceed the rows."""
        settings = self._greedy_rows.settings
        if num_samples > len(settings):
            self._greedy_rows = StagedDraw(settings[:1].repeat(num_samples, 1), None, NO_LIMITS)
        return self._greedy_rows

    def shaped(self, logits: Tensor, staged: StagedDraw | None, indices: Tensor) -> Tensor:
        """Return a copy of some samples' logits [M], with temperature and filters applied as before a draw."""
        shaped = logits[indices]
        if staged is None:
            return shaped
        settings = staged.settings[indices]
        is_random = settings[:, :1] != 0.0
        # Greedy rows are computed too: selecting the others would synchronize with the device.
        settings = torch.cat((settings[:, :1].where(is_random, 1.0), settings[:, 1:]), dim=1)
        if self._batch.device_tokens is None:
            return shaped_logits(shaped.clone(), settings).where(is_random, shaped)
        return shaped_at_once(shaped.clone(), settings, staged.limits).where(is_random, shaped)


LOGITS_FEATURES: PluginTable[Callable[[InputBatch, int], LogitsFeature[Any]]] = PluginTable(
    "quire.logits_features",
    "a logits feature",
    {
        "allowed_token_ids": AllowedTokenIds,
        "bad_words": BadWords,
        "min_tokens": MinTokens,
        "logit_bias": LogitBias,
        "logits_processors": CustomProcessors,
        "penalties": make_penalties,
        "windowed_penalties": WindowedPenalties,
        "dry": Dry,
        "thinking_token_budget": ThinkingBudget,
    },
    FACTORY,
)
"""Features in the order of application; plug-ins follow by name, then grammars, then the sampler chain."""

NON_FINITE = "the model produced non-finite logits"
NO_TOKEN_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, min_tokens, stop tokens or "
    "structured_outputs exclude all"
)

_FAILURES = {-1: NO_TOKEN_LEFT, -2: NON_FINITE}
"""Meaning of a negative code in place of a token id; -1 is that of `ops.sample_tokens`."""
NON_FINITE_CODE = -2


class SamplerOutput(NamedTuple):
    """Samples of N rows, on the host."""

    token_ids: NDArray[np.int64]
    """[N]; 0 for rows in `failed`."""
    logprobs: dict[int, TokenLogprobs]
    """Logprobs by index of the rows that request them."""
    failed: dict[int, str]
    """Failure reasons by index of the failed rows."""


class Sampled(NamedTuple):
    """Samples of N rows, on the device."""

    codes: Tensor
    """[N] int64: token id, or a negative failure code."""
    logprobs: RawLogprobs | None
    wanting: NDArray[np.int64]
    """Rows that `logprobs` belong to."""
    failures: Failures
    """Rows failed by a feature."""

    @staticmethod
    def of_codes(codes: Tensor) -> Sampled:
        """Return samples without logprobs or failures of features."""
        return Sampled(codes, None, np.zeros(0, dtype=np.int64), Failures())

    def moved(self, move: Callable[[Tensor], Tensor]) -> Sampled:
        """Return a copy with its tensors moved, as by `Transfers.download`."""
        logprobs = None if self.logprobs is None else moved(self.logprobs, move)
        return Sampled(move(self.codes), logprobs, self.wanting, self.failures)

    def read(self) -> SamplerOutput:
        """Return the output; the tensors must be on the host."""
        token_ids: NDArray[np.int64] = self.codes.numpy()
        failed: dict[int, str] = {}
        if token_ids.min() < 0:
            failed = {row: _FAILURES[int(token_ids[row])] for row in (token_ids < 0).nonzero()[0].tolist()}
            token_ids = token_ids.clip(0)
        failed = {**self.failures, **failed}
        entries = [] if self.logprobs is None else self.logprobs.entries()
        return SamplerOutput(token_ids, dict(zip(self.wanting.tolist(), entries, strict=True)), failed)


class StagedRows(NamedTuple):
    """Staged values of all features for the samples of a step."""

    features: list[tuple[LogitsFeature[Any], Any]]
    draw: StagedDraw | None
    logprobs: StagedLogprobs | None

    @property
    def is_plain_greedy(self) -> bool:
        """True if all rows sample the model's most likely token and nothing else is requested."""
        return not self.features and self.draw is None and self.logprobs is None

    def num_deciding(self) -> int | None:
        """Return the number of top tokens of the model's order that decide each sample; None: any may.

        Features that change logits may promote any token, and logprobs need the mass of all.
        """
        if self.features or self.logprobs is not None:
            return None
        return 1 if self.draw is None else self.draw.num_deciding()

    def moved(self, move: Callable[[Tensor], Tensor]) -> StagedRows:
        """Return a copy with its tensors moved, as by `Transfers.upload`."""
        return StagedRows(
            [(feature, moved(value, move)) for feature, value in self.features],
            None if self.draw is None else moved(self.draw, move),
            None if self.logprobs is None else moved(self.logprobs, move),
        )


NOTHING_STAGED = StagedRows([], None, None)  # greedy rows without features


class Sampler:
    """Sampler of the rows of a batch, which it reads and does not change.

    Args:
        logprobs_mode: numbers reported as logprobs.
        processors: logits processors of the whole engine.
        features: further features, between the table's and the sampler chain.
    """

    def __init__(
        self,
        batch: InputBatch,
        vocab_size: int,
        transfers: Transfers,
        *,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        processors: Sequence[LogitsProcessor] = (),
        features: Sequence[LogitsFeature[Any]] = (),
    ) -> None:
        self._batch = batch
        self._replays: dict[int, int] = {}  # row -> its tokens when added, some of which are replayed
        self._transfers = transfers
        self._mode = logprobs_mode
        self._logits_features = [
            *_logits_features(batch, vocab_size, processors),
            *features,
            SamplerChain(batch, vocab_size, transfers.torch_device),
        ]
        self._limits_of_drafts = [one for one in self._logits_features if one.limits_drafts]
        self._draw = RandomDraw(batch, vocab_size, transfers.torch_device)
        self._logprobs = Logprobs(batch)
        self._features: list[Feature[Any]] = [*self._logits_features, self._draw, self._logprobs]

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Add a request that was given a row.

        With sampler state it starts after its prompt, and `replay` adds what was sampled before.
        """
        if request.sampling_params.has_sampler_state and len(request.token_ids) > request.num_prompt_tokens:
            self._replays[row] = len(request.token_ids)
            prompt = request.token_ids[: request.num_prompt_tokens]
            request = msgspec.structs.replace(request, token_ids=prompt)
        for feature in self._features:
            feature.add_request(row, request)

    def remove_request(self, row: int) -> None:
        self._replays.pop(row, None)
        for feature in self._features:
            feature.remove_request(row)

    def set_num_logprobs(self, row: int, num_logprobs: int) -> None:
        """Report another number of most likely tokens of a row from now on."""
        self._logprobs.set_num(row, num_logprobs)

    def columns_to_replay(self, row: int, start: int, end: int) -> range:
        """Return the columns after positions `start` to `end` that were sampled before the row was added."""
        num_known = self._replays.get(row)
        if num_known is None:
            return range(0)
        return range(max(start + 1, int(self._batch.num_prompt_tokens[row])), min(end + 1, num_known))

    def replay(self, logits: Tensor, row: int, column: int) -> None:
        """Sample a known token again from logits [1, V], which are changed, to restore the features' state after it.

        Columns of a row must come in order.
        """
        num_tokens = int(self._batch.num_tokens[row])
        self._batch.num_tokens[row] = column
        try:
            staged = self.stage(Samples(np.array([row]), np.array([column])))
            self.sample(logits, staged._replace(logprobs=None))
        finally:
            self._batch.num_tokens[row] = num_tokens
        if column + 1 == self._replays[row]:
            del self._replays[row]

    @property
    def replays(self) -> bool:
        """True if a row has tokens to replay."""
        return bool(self._replays)

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """Return whether `stage` needs these rows' sampled tokens on the host."""
        return any(feature.reads_tokens and feature.has_users(rows) for feature in self._features)

    def stage(self, samples: Samples) -> StagedRows:
        """Stage N samples; needs no logits, so it can run during the forward pass."""
        return self.stage_on_host(samples).moved(self._transfers.upload)

    def stage_on_host(self, samples: Samples) -> StagedRows:
        """Stage N samples, with tensors still on the host."""
        staged = ((feature, feature.stage(samples)) for feature in self._logits_features)
        return StagedRows(
            features=[(feature, value) for feature, value in staged if value is not None],
            draw=self._draw.stage(samples),
            logprobs=self._logprobs.stage(samples),
        )

    def only_draws(self, rows: NDArray[np.int64]) -> bool:
        """Return whether these rows use no feature but random or greedy sampling."""
        others = (*self._logits_features, self._logprobs)
        return not any(feature.has_users(rows) for feature in others)

    def draws(self, samples: Samples) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return settings [N, 4] and keys [N, 2] of `ops.sample_tokens` for all N samples, greedy ones included."""
        return self._draw.settings(samples.rows), self._draw.keys(samples)

    @property
    def penalties(self) -> DevicePenalties | None:
        """Penalties counted by the device, if any."""
        found = (one for one in self._logits_features if isinstance(one, DevicePenalties))
        return next(found, None)

    def num_allowed(self, row: int, known: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Return how many leading drafts after a row's known tokens its features allow."""
        counts = (one.num_allowed(row, known, drafts) for one in self._limits_of_drafts)
        return min(counts, default=len(drafts))

    def forced_tokens(self, row: int, known: NDArray[np.int32]) -> list[int]:
        """Return tokens that a feature forces after a row's known tokens, if one does."""
        found = (one.forced_tokens(row, known) for one in self._limits_of_drafts)
        return next(filter(None, found), [])

    def sample_draft(self, logits: Tensor, samples: Samples) -> Tensor:
        """Sample from a draft model's logits [N, V] float32, contiguous, which are changed: [N] int64.

        Negative where no token can be sampled.
        """
        return self.sample(logits, self.stage(samples)._replace(logprobs=None)).codes

    def sample(self, logits: Tensor, staged: StagedRows) -> Sampled:
        """Sample a token for each row of logits [N, V] float32, contiguous, which may be changed in place."""
        is_bad, wanted, failures = clear_unusable(logits), staged.logprobs, Failures()
        reported = None if wanted is None or self._mode.is_processed else _raw_logits(logits, staged, wanted)
        for feature, value in staged.features:
            failures.update(feature.apply(logits, value) or {})
        if wanted is not None and self._mode.is_processed:
            reported = self._draw.shaped(logits, staged.draw, wanted.indices)
        chosen = self._draw.choose(logits, staged.draw)
        codes = chosen.masked_fill(is_bad, NON_FINITE_CODE)
        if wanted is None or reported is None:
            return Sampled.of_codes(codes)._replace(failures=failures)
        about = chosen.clamp(min=0)[wanted.indices]
        return Sampled(codes, wanted.read(reported, about, self._mode), wanted.rows, failures)


def _logits_features(
    batch: InputBatch, vocab_size: int, processors: Sequence[LogitsProcessor]
) -> Iterator[LogitsFeature[Any]]:
    for make in LOGITS_FEATURES.resolve_all():
        is_custom = make is CustomProcessors
        yield CustomProcessors(batch, vocab_size, processors) if is_custom else make(batch, vocab_size)


def clear_unusable(logits: Tensor) -> Tensor:
    """Zero the rows of [N, V] that `ops.unusable_rows` finds; return which, [N] bool."""
    is_bad = ops.unusable_rows(logits)
    ops.clear_rows(logits, is_bad)
    return is_bad


def _raw_logits(logits: Tensor, staged: StagedRows, wanted: StagedLogprobs) -> Tensor:
    """Return the logits of rows that request logprobs, copied only if they will be changed."""
    if staged.features or len(wanted.rows) < len(logits):
        return logits[wanted.indices]
    return logits
