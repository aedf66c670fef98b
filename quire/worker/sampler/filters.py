"""Features that shape the distribution of random rows: `temperature`, `min_p`, `top_k` and `top_p`, in this
order.

Invariant: a row that does not use a feature gets its neutral value, so staging never looks at how rows are
mixed. All floating-point work is row by row (softmax, cumulative sums), never an element-wise function over
the whole batch whose vector lanes would depend on a row's place in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch
from quire.worker.sampler.feature import LogitsFeature
from quire.worker.sampler.order import ids_of, order_keys

_MAX_LOGIT = torch.finfo(torch.float32).max
_FIRST_WIDTH = 64
_WIDENING = 16


class Temperature(LogitsFeature[Tensor]):
    """Divides the logits; greedy rows are left alone."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._temperature = np.ones(batch.max_num_seqs, dtype=np.float32)

    def wants(self, params: SamplingParams) -> bool:
        return not params.greedy and params.temperature != 1.0

    def _store(self, row: int, request: NewRequestData) -> None:
        self._temperature[row] = request.sampling_params.temperature

    def _forget(self, row: int) -> None:
        self._temperature[row] = 1.0

    def _stage(self, rows: NDArray[np.int64], users: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self._temperature[rows])

    def apply(self, logits: Tensor, staged: Tensor) -> None:
        logits.div_(staged[:, None]).clamp_(max=_MAX_LOGIT)


class MinP(LogitsFeature[Tensor]):
    """Drops tokens less likely than a share of the most likely one (N. Nguyen et al., "Turning up the heat", 2024)."""

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._log_min_p = np.full(batch.max_num_seqs, -np.inf, dtype=np.float32)

    def wants(self, params: SamplingParams) -> bool:
        return params.min_p > 0.0

    def _store(self, row: int, request: NewRequestData) -> None:
        self._log_min_p[row] = np.log(request.sampling_params.min_p)

    def _forget(self, row: int) -> None:
        self._log_min_p[row] = -np.inf

    def _stage(self, rows: NDArray[np.int64], users: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self._log_min_p[rows])

    def apply(self, logits: Tensor, staged: Tensor) -> None:
        lowest = logits.amax(1) + staged
        logits.masked_fill_(logits < lowest[:, None], -torch.inf)


class StagedTruncation(NamedTuple):
    users: Tensor
    """[U] rows of the step."""
    top_k: Tensor
    """[U] int64; the size of the vocabulary if off."""
    top_p: Tensor
    """[U] float64; 1.0 if off."""
    width: int
    """How many of the most likely tokens to look at first: at least every `top_k` that is on."""


class TopKTopP(LogitsFeature[StagedTruncation]):
    """Keeps the `top_k` first tokens, of those the fewest first ones that hold `top_p` of the mass left.

    A. Fan et al., "Hierarchical neural story generation" (2018); A. Holtzman et al., "The curious case of
    neural text degeneration" (2019). Both keep a prefix of the order of tokens, so what is looked for is that
    prefix's last key: by partial selection, widened for the rows whose mass lies deeper; a wider look gives
    the same answer.
    """

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._vocab_size = vocab_size
        self._top_k = np.full(batch.max_num_seqs, vocab_size, dtype=np.int64)
        self._top_p = np.ones(batch.max_num_seqs)

    def wants(self, params: SamplingParams) -> bool:
        return params.top_p < 1.0 or 0 < params.top_k < self._vocab_size

    def _store(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        self._top_k[row] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[row] = params.top_p

    def _stage(self, rows: NDArray[np.int64], users: NDArray[np.int64]) -> StagedTruncation:
        top_k, top_p = self._top_k[rows[users]], self._top_p[rows[users]]
        width = int(top_k.max(where=top_k < self._vocab_size, initial=min(_FIRST_WIDTH, self._vocab_size)))
        return StagedTruncation(
            torch.from_numpy(users), torch.from_numpy(top_k), torch.from_numpy(top_p), width
        )

    def apply(self, logits: Tensor, staged: StagedTruncation) -> None:
        whole_batch = len(staged.users) == len(logits)
        used = logits if whole_batch else logits.index_select(0, staged.users)
        keys = order_keys(used)
        last = _last_kept_key(
            keys, used.softmax(1, dtype=torch.float64), staged.top_k, staged.top_p, staged.width
        )
        used.masked_fill_(keys < last[:, None], -torch.inf)
        if not whole_batch:
            logits.index_copy_(0, staged.users, used)


def _last_kept_key(keys: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """Key of the last token that each row keeps, [U]; `keys` and `probs` are [U, V]."""
    vocab_size = keys.shape[1]
    best = keys.topk(width).values
    mass = probs.gather(1, ids_of(best, vocab_size)).cumsum(1)
    is_limited = top_k < vocab_size
    total = torch.where(is_limited, mass.gather(1, top_k.clamp(max=width)[:, None] - 1).squeeze(1), 1.0)
    # top_p = 1 keeps everything, also what is lost in the rounding of the sum.
    wanted = torch.where(top_p < 1.0, top_p * total, torch.inf)
    is_before_enough = torch.nn.functional.pad(mass[:, :-1], (1, 0)) < wanted[:, None]
    num_kept = torch.minimum(is_before_enough.sum(1), top_k).clamp(min=1)
    last = best.gather(1, num_kept.clamp(max=width)[:, None] - 1).squeeze(1)
    deeper = torch.nonzero(~is_limited & (mass[:, -1] < wanted)).squeeze(1)
    if width < vocab_size and len(deeper):
        wider = min(width * _WIDENING, vocab_size)
        last[deeper] = _last_kept_key(keys[deeper], probs[deeper], top_k[deeper], top_p[deeper], wider)
    return last
