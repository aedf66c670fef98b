"""The choice of one token per row: the first of the order for greedy rows, a random one for the others.

Invariant: a random row's token is a function of its own logits and settings and of (seed, output index). What
the settings mean is the contract of `ops.sample_tokens`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.kernels.limits import NO_LIMITS, Limits
from quire.kernels.reference_sampling import shaped_at_once, shaped_logits
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.chain import neutral_settings
from quire.worker.sampler.feature import Feature


class StagedDraw(NamedTuple):
    """What `ops.sample_tokens` takes besides the logits, for all N samples of the step."""

    settings: Tensor
    keys: Tensor | None
    limits: Limits

    def num_deciding(self) -> int:
        """How many tokens at the head of each row's order decide what is drawn; those behind them change nothing.

        Without top-k all do: the mass of all is what top-p is a part of, and min-p may leave any number. While the
        settings are on the host.
        """
        temperature, top_k = self.settings[:, 0], self.settings[:, 2]
        return int(top_k.where(temperature != 0.0, 1.0).max())


def greedy_settings(vocab_size: int) -> tuple[float, float, float, float]:
    """Of a row that takes the first token of the order."""
    return 0.0, -np.inf, float(vocab_size), 1.0


class Draw(Feature[StagedDraw]):
    """Random choice, shaped by temperature, min-p, top-k and top-p, for the rows that use it; greedy for the others."""

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
        assert params.seed is not None, "the front end gives every random request a seed"
        self._seeds[row] = params.seed
        if params.has_sampler_chain:  # which has left the distribution as it is to be
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
            Limits(*(settings[:, 1:] != self._greedy[1:]).any(0).tolist()),
        )

    def settings(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """[N, 4] of rows [N]."""
        settings: NDArray[np.float64] = self._settings[rows]
        return settings

    def keys(self, samples: Samples) -> NDArray[np.int64]:
        """[N, 2] the seed and the place of each sample."""
        return np.stack((self._seeds[samples.rows], self._batch.output_indices(samples)), axis=1)

    def choose(self, logits: Tensor, staged: StagedDraw | None) -> Tensor:
        """Logits [N, V] -> token ids [N] int64, -1 where no token is left."""
        settings, keys, limits = staged or self._all_greedy(len(logits))
        return ops.sample_tokens(logits, settings[: len(logits)], keys, limits)

    def _all_greedy(self, num_samples: int) -> StagedDraw:
        """Settings of at least so many samples; with drafts these may be more than there are rows."""
        settings = self._greedy_rows.settings
        if num_samples > len(settings):
            self._greedy_rows = StagedDraw(settings[:1].repeat(num_samples, 1), None, NO_LIMITS)
        return self._greedy_rows

    def shaped(self, logits: Tensor, staged: StagedDraw | None, indices: Tensor) -> Tensor:
        """A copy of the logits of some samples, [M], with temperature and filters applied as before a draw."""
        shaped = logits[indices]
        if staged is None:
            return shaped
        settings = staged.settings[indices]
        is_random = settings[:, :1] != 0.0
        # Of greedy rows nothing is wanted, but nobody waits for a device to say which they are.
        settings = torch.cat((settings[:, :1].where(is_random, 1.0), settings[:, 1:]), dim=1)
        if self._batch.device_tokens is None:
            return shaped_logits(shaped.clone(), settings).where(is_random, shaped)
        return shaped_at_once(shaped.clone(), settings, staged.limits).where(is_random, shaped)
