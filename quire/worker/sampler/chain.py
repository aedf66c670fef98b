"""llama.cpp's own filters of candidates, and all others with them in llama.cpp's order.

A request that uses one of `top_n_sigma`, `typical_p`, XTC, dynamic temperature and mirostat has its candidates chosen
here: top_n_sigma, top_k, typical_p, top_p, min_p, XTC, temperature. With mirostat it is the temperature and mirostat
alone. What is left is drawn from as it is (`Draw`).

- top-n-sigma: C. Tang et al., "Top-nsigma: not all logits are you need" (2024)
- typical: C. Meister et al., "Locally typical sampling" (2022)
- mirostat: S. Basu et al., "Mirostat: a neural text decoding algorithm" (2021)
- XTC and dynamic temperature: the samplers `xtc` and `temp-ext` of llama.cpp

Invariant: rows are shaped one at a time, and functions whose vector lanes could round otherwise than their scalar form
are applied along a row (softmax, cumulative sums) or to one element: the bits do not depend on the batch or on threads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.kernels.limits import NO_LIMITS
from quire.kernels.philox import uniform
from quire.kernels.token_order import ids_of, order_keys
from quire.sampling_params import MIN_TEMPERATURE, SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import LogitsFeature

_MAX_LOGIT = torch.finfo(torch.float32).max
_XTC_STREAM = 1 << 62  # added to a place, so that XTC's numbers are none of those that draw the token
_NUM_MIROSTAT_TOKENS = 100  # by which mirostat 1 estimates the exponent of Zipf's law
_NUM_PLACES = 256  # places of a row whose mu is kept: more than a step has drafts


class _Candidates(NamedTuple):
    """The first tokens of a row's order."""

    ids: Tensor
    """[1, W] int64."""
    logits: Tensor
    """[1, W] float64, in falling order; -inf where a filter has dropped the token."""

    @classmethod
    def of(cls, logits: Tensor, count: int) -> _Candidates:
        """Return the first `count` of logits [1, V]."""
        ids = ids_of(order_keys(logits).topk(count).values, logits.shape[1])
        return cls(ids, logits.gather(1, ids).double())

    def keep(self, is_kept: Tensor) -> _Candidates:
        return self._replace(logits=self.logits.masked_fill(~is_kept, -torch.inf))

    def scaled(self, temperature: Tensor | float) -> _Candidates:
        return self._replace(logits=(self.logits / temperature).clamp(max=_MAX_LOGIT))

    @property
    def probs(self) -> Tensor:
        return self.logits.softmax(1)

    def put(self, logits: Tensor) -> None:
        """Write them to logits [1, V], in which no other token is left."""
        logits.fill_(-torch.inf).scatter_(1, self.ids, self.logits.float())


def shape(logits: Tensor, params: SamplingParams, *, excludes: bool) -> None:
    """Change logits [1, V] float32 to those of the distribution to draw from.

    Args:
        excludes: whether XTC applies to this token.
    """
    vocab_size = logits.shape[1]
    if params.top_n_sigma > 0.0:
        _drop_beyond_sigma(logits, params.top_n_sigma)
    found = _Candidates.of(logits, min(params.top_k or vocab_size, vocab_size))
    if params.typical_p < 1.0:
        found = found.keep(_are_typical(found, params.typical_p))
    if params.top_p < 1.0:
        found = found.keep(_mass_before(found.probs) < params.top_p)
    if params.min_p > 0.0:
        lowest = found.logits.amax(1, keepdim=True) + math.log(params.min_p)
        found = found.keep(found.logits >= lowest)
    if excludes:
        above = (found.probs >= params.xtc_threshold) & (found.logits != -torch.inf)
        last = above.cumsum(1) == above.sum(1, keepdim=True)
        found = found.keep(~above | last)
    if params.dynatemp_range > 0.0:
        found = found.scaled(_dynamic_temperature(found, params))
    elif params.temperature > 0.0:
        found = found.scaled(params.temperature)
    found.put(logits)


def _drop_beyond_sigma(logits: Tensor, num_sigmas: float) -> None:
    is_left = logits != -torch.inf
    count = is_left.sum(1, keepdim=True)
    values = logits.double().where(is_left, 0.0)
    mean = _sum(values) / count
    spread = (values - mean).where(is_left, 0.0)
    sigma = (_sum(spread * spread) / count).sqrt()
    logits.masked_fill_(logits < logits.amax(1, keepdim=True) - num_sigmas * sigma, -torch.inf)


def _are_typical(found: _Candidates, mass: float) -> Tensor:
    """Return which candidates are kept, [1, W]: those whose surprise is nearest to the entropy, of equal ones the
    likelier, until they have more than this mass.
    """
    logprobs, probs = found.logits.log_softmax(1), found.probs
    distance = (-logprobs - _entropy(logprobs, probs)).abs()
    order = distance.argsort(dim=1, stable=True)
    is_kept = _mass_before(probs.gather(1, order)) <= mass
    return torch.zeros_like(is_kept).scatter(1, order, is_kept)


def _dynamic_temperature(found: _Candidates, params: SamplingParams) -> Tensor:
    """Return a temperature [1, 1] by how near the entropy is to that of equal chances."""
    low, high = (
        max(0.0, params.temperature - params.dynatemp_range),
        params.temperature + params.dynatemp_range,
    )
    num_left = (found.logits != -torch.inf).sum(1, keepdim=True)
    greatest = num_left.clamp(min=2).double().log()
    share = _entropy(found.logits.log_softmax(1), found.probs) / greatest
    return (low + (high - low) * share.clamp(0.0, 1.0) ** params.dynatemp_exponent).clamp(min=MIN_TEMPERATURE)


def _entropy(logprobs: Tensor, probs: Tensor) -> Tensor:
    return -_sum((probs * logprobs).where(probs > 0.0, 0.0))


def _mass_before(probs: Tensor) -> Tensor:
    return torch.nn.functional.pad(probs.cumsum(1)[:, :-1], (1, 0))


def _sum(values: Tensor) -> Tensor:
    return values.cumsum(1)[:, -1:]


def _first_by_surprise(found: _Candidates, mu: Tensor) -> Tensor:
    """Return which candidates mirostat 2 keeps: those whose surprise in bits is at most mu, and the first."""
    is_kept = -found.logits.log_softmax(1) / math.log(2.0) <= mu
    is_kept[:, 0] = True
    return is_kept


def _first_by_zipf(found: _Candidates, mu: Tensor, vocab_size: int) -> Tensor:
    """Return which candidates mirostat 1 keeps: as many first ones as Zipf's law has of surprise mu."""
    places = torch.arange(found.logits.shape[1], device=mu.device)
    head = found.logits[:, :_NUM_MIROSTAT_TOKENS]
    steps = torch.tensor([math.log((i + 2) / (i + 1)) for i in range(head.shape[1] - 1)], dtype=torch.float64)
    steps = steps.to(mu.device)
    # Of tokens that are left, which come first: logarithms of ratios of probabilities are differences of logits.
    is_left = head[:, 1:] != -torch.inf
    falls = (head[:, :-1] - head[:, 1:]).where(is_left, 0.0)
    if not falls.shape[1]:
        return places[None] < 1
    squares = (steps * steps)[None].where(is_left, 0.0)
    s_hat = _sum(steps * falls) / _sum(squares)
    epsilon = s_hat - 1.0
    rest = 1.0 - vocab_size**-epsilon
    ratio = torch.where(epsilon.abs() < 1e-9, 1.0 / math.log(max(vocab_size, 2)), epsilon / rest)
    count = ((ratio * 2.0**mu) ** (1.0 / s_hat)).nan_to_num(nan=1.0).clamp(1.0, float(len(places)))
    return places[None] < count.floor()


class Chained(NamedTuple):
    """A sample of a request that uses the chain."""

    sample: int
    row: int
    column: int
    excludes: bool
    seed: int
    place: int


class StagedChain(NamedTuple):
    samples: list[Chained]


class SamplerChain(LogitsFeature[StagedChain]):
    """Filters candidates in llama.cpp's order.

    Mirostat's mu before a token is a function of the tokens before it and their logits. It is kept for the places of
    the last tokens, so those behind drafts that turn out to be wrong are written over like the tokens themselves.
    """

    def __init__(self, batch: InputBatch, vocab_size: int, device: torch.device) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._device = device
        self._params: dict[int, SamplingParams] = {}
        self._mus: dict[int, Tensor] = {}
        self._neutral = torch.tensor(neutral_settings(vocab_size), dtype=torch.float64, device=device)[None]

    def wants(self, params: SamplingParams) -> bool:
        return params.has_sampler_chain

    def _store(self, row: int, request: NewRequestData) -> None:
        params = self._params[row] = request.sampling_params
        if params.mirostat:
            mu = torch.full((_NUM_PLACES,), 2.0 * params.mirostat_tau, dtype=torch.float64)
            self._mus[row] = mu.to(self._device)

    def _forget(self, row: int) -> None:
        del self._params[row]
        self._mus.pop(row, None)

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedChain:
        rows, columns = samples.rows[users].tolist(), samples.columns[users].tolist()
        places = self._batch.output_indices(samples)[users]
        params = [self._params[row] for row in rows]
        seeds = np.array([one.seed or 0 for one in params], dtype=np.int64)
        chances = uniform(seeds, places + _XTC_STREAM)
        excludes = [
            one.uses_xtc and chance <= one.xtc_probability
            for one, chance in zip(params, chances.tolist(), strict=True)
        ]
        fields = (users.tolist(), rows, columns, excludes, seeds.tolist(), places.tolist())
        return StagedChain([Chained(*one) for one in zip(*fields, strict=True)])

    def apply(self, logits: Tensor, staged: StagedChain) -> None:
        for one in staged.samples:
            row_logits, params = logits[one.sample : one.sample + 1], self._params[one.row]
            if params.mirostat:
                self._apply_mirostat(row_logits, params, one)
            else:
                shape(row_logits, params, excludes=one.excludes)

    def _apply_mirostat(self, logits: Tensor, params: SamplingParams, one: Chained) -> None:
        """Filter by mu, and take in the surprise of what will be drawn."""
        vocab_size, mus = logits.shape[1], self._mus[one.row]
        mu = mus[one.column % _NUM_PLACES].view(1, 1)
        found = _Candidates.of(logits, vocab_size).scaled(params.temperature)
        is_first = params.mirostat == 1
        found = found.keep(
            _first_by_zipf(found, mu, vocab_size) if is_first else _first_by_surprise(found, mu)
        )
        found.put(logits)
        key = torch.tensor([[one.seed, one.place]], device=self._device)
        chosen = ops.sample_tokens(logits, self._neutral, key, NO_LIMITS)
        prob = _sum(found.probs.where(found.ids == chosen[:, None], 0.0))
        error = -prob.log2() - params.mirostat_tau
        following = (mu - params.mirostat_eta * error).view(())
        mus[(one.column + 1) % _NUM_PLACES] = following.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def neutral_settings(vocab_size: int) -> tuple[float, float, float, float]:
    """Return settings of `ops.sample_tokens` that draw from the logits as they are."""
    return 1.0, -np.inf, float(vocab_size), 1.0
