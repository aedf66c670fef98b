# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's candidate filters, in llama.cpp's order.

A request that uses top_n_sigma, typical_p, XTC, dynamic temperature or mirostat is filtered here: top_n_sigma, top_k,
typical_p, top_p, min_p, XTC, temperature; with mirostat, temperature and mirostat only. `Draw` then samples from the
result as it is.

- top-n-sigma: C. Tang et al., "Top-nsigma: not all logits are you need" (2024)
- typical: C. Meister et al., "Locally typical sampling" (2022)
- mirostat: S. Basu et al., "Mirostat: a neural text decoding algorithm" (2021)
- XTC and dynamic temperature: the samplers `xtc` and `temp-ext` of llama.cpp

Invariant: bits do not depend on the batch or on threads. Rows are shaped one at a time; functions whose vector form
could round differently are applied along a row (softmax, cumulative sums) or to one element.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import ops
from quire.kernels.attention_metadata import NO_LIMITS, SamplingLimits
from quire.kernels.reference_sampling import order_keys, shaped_at_once, shaped_logits, uniform
from quire.sampling_params import MIN_TEMPERATURE, SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import LogitsFeature

_MAX_LOGIT = torch.finfo(torch.float32).max
_XTC_STREAM = 1 << 62  # added to the output index, so that XTC and the draw use different random numbers
_GREATEST_KEY = torch.iinfo(torch.int64).max
_FIRST_WIDTH, _WIDENING = 1024, 16  # typical tokens searched first, and the growth factor
_NUM_MIROSTAT_TOKENS = 100  # tokens from which mirostat 1 estimates the exponent of Zipf's law
_NUM_PLACES = 256  # positions of a row whose mu is kept: more than a step has drafts


def shape(logits: Tensor, params: SamplingParams, *, excludes: bool) -> None:
    """Change logits [1, V] float32 to those of the distribution to draw from.

    Args:
        excludes: whether XTC applies to this token.
    """
    if params.top_n_sigma > 0.0:
        _drop_beyond_sigma(logits, params.top_n_sigma)
    if 0 < params.top_k < logits.shape[1]:
        _truncate(logits, top_k=params.top_k)
    if params.typical_p < 1.0:
        _drop(logits, ~_are_typical(logits, params.typical_p))
    if params.top_p < 1.0:
        _truncate(logits, top_p=params.top_p)
    if params.min_p > 0.0:
        _drop(logits, logits < logits.amax(1, keepdim=True) + math.log(params.min_p))
    if excludes:
        _exclude_top_choices(logits, params.xtc_threshold)
    if params.dynatemp_range > 0.0:
        _scale(logits, _dynamic_temperature(logits, params))
    elif params.temperature > 0.0:
        _scale(logits, params.temperature)


def _drop(logits: Tensor, dropped: Tensor) -> None:
    logits.masked_fill_(dropped, -torch.inf)


def _scale(logits: Tensor, temperature: Tensor | float) -> None:
    logits.copy_((logits.double() / temperature).clamp(max=_MAX_LOGIT))


def _truncate(logits: Tensor, *, top_k: int | Tensor | None = None, top_p: float = 1.0) -> None:
    """Keep the top k tokens, or the fewest that hold the mass top_p."""
    settings = torch.tensor([neutral_settings(logits.shape[1])], dtype=torch.float64, device=logits.device)
    if top_k is not None:
        settings[0, 2] = top_k
    settings[0, 3] = top_p
    if logits.is_cpu:
        shaped_logits(logits, settings)
    else:
        shaped_at_once(
            logits, settings, SamplingLimits(min_p=False, top_k=top_k is not None, top_p=top_p < 1.0)
        )


def _drop_beyond_sigma(logits: Tensor, num_sigmas: float) -> None:
    is_left = logits != -torch.inf
    count = is_left.sum(1, keepdim=True)
    values = logits.double().where(is_left, 0.0)
    mean = _sum(values) / count
    spread = (values - mean).where(is_left, 0.0)
    sigma = (_sum(spread * spread) / count).sqrt()
    _drop(logits, logits < logits.amax(1, keepdim=True) - num_sigmas * sigma)


def _are_typical(logits: Tensor, mass: float) -> Tensor:
    """Return the kept tokens, [1, V]: those with surprise nearest to the entropy, up to `mass`.

    Ties go to the lower token.
    """
    logprobs, probs = _logprobs(logits), _probs(logits)
    distance = (-logprobs - _entropy(logprobs, probs)).abs()[0]
    width = min(_FIRST_WIDTH, len(distance)) if logits.is_cpu else len(distance)
    while True:
        ids = distance.topk(width, largest=False).indices.sort().values  # ties in token order
        nearest, order = distance[ids].sort(stable=True)
        ids = ids[order]
        is_kept = torch.nn.functional.pad(probs[0, ids].cumsum(0)[:-1], (1, 0)) <= mass
        # Further tokens at the greatest distance may lie outside.
        if width == len(distance) or not (is_kept & (nearest == nearest[-1])).any():
            return (
                torch.zeros_like(logits, dtype=torch.bool)
                .index_fill_(1, ids, True)
                .index_put_((torch.zeros_like(ids), ids), is_kept)
            )
        width = min(width * _WIDENING, len(distance))


def _exclude_top_choices(logits: Tensor, threshold: float) -> None:
    """Drop all tokens of at least this probability but the least likely of them."""
    above = (_probs(logits) >= threshold) & (logits != -torch.inf)
    keys = order_keys(logits)
    last = keys.masked_fill(~above, _GREATEST_KEY).amin(1, keepdim=True)
    _drop(logits, above & (keys != last))


def _dynamic_temperature(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return a temperature [1, 1] from the entropy relative to the uniform distribution's."""
    low, high = (
        max(0.0, params.temperature - params.dynatemp_range),
        params.temperature + params.dynatemp_range,
    )
    num_left = (logits != -torch.inf).sum(1, keepdim=True)
    greatest = num_left.clamp(min=2).double().log()
    share = _entropy(_logprobs(logits), _probs(logits)) / greatest
    return (low + (high - low) * share.clamp(0.0, 1.0) ** params.dynatemp_exponent).clamp(min=MIN_TEMPERATURE)


def _probs(logits: Tensor) -> Tensor:
    return logits.softmax(1, dtype=torch.float64)


def _logprobs(logits: Tensor) -> Tensor:
    return logits.log_softmax(1, dtype=torch.float64)


def _entropy(logprobs: Tensor, probs: Tensor) -> Tensor:
    return -_sum((probs * logprobs).where(probs > 0.0, 0.0))


def _sum(values: Tensor) -> Tensor:
    return values.cumsum(1)[:, -1:]


def _drop_by_surprise(logits: Tensor, mu: Tensor) -> None:
    """Apply mirostat 2: keep tokens with a surprise of at most mu bits, and the top token."""
    keys = order_keys(logits)
    is_first = keys == keys.amax(1, keepdim=True)
    _drop(logits, ~((-_logprobs(logits) / math.log(2.0) <= mu) | is_first))


def _drop_by_zipf(logits: Tensor, mu: Tensor) -> None:
    """Apply mirostat 1: keep the top k tokens, k from mu and the Zipf exponent of the head."""
    vocab_size = logits.shape[1]
    head = logits.topk(min(_NUM_MIROSTAT_TOKENS, vocab_size)).values.double()
    steps = torch.tensor([math.log((i + 2) / (i + 1)) for i in range(head.shape[1] - 1)], dtype=torch.float64)
    steps = steps.to(mu.device)
    # log(p1 / p2) is a difference of logits.
    is_left = head[:, 1:] != -torch.inf
    falls = (head[:, :-1] - head[:, 1:]).where(is_left, 0.0)
    squares = (steps * steps)[None].where(is_left, 0.0)
    if not falls.shape[1]:
        return
    s_hat = _sum(steps * falls) / _sum(squares)
    epsilon = s_hat - 1.0
    ratio = epsilon / (1.0 - vocab_size**-epsilon)
    ratio = torch.where(epsilon.abs() < 1e-9, 1.0 / math.log(max(vocab_size, 2)), ratio)
    count = ((ratio * 2.0**mu) ** (1.0 / s_hat)).nan_to_num(nan=1.0).clamp(1.0, float(vocab_size))
    _truncate(logits, top_k=count.floor().view(()))


class Chained(NamedTuple):
    """Sample of a request that uses the chain."""

    sample: int
    row: int
    column: int
    excludes: bool
    seed: int
    place: int


class StagedChain(NamedTuple):
    samples: list[Chained]


class SamplerChain(LogitsFeature[StagedChain]):
    """Candidate filters in llama.cpp's order.

    Mirostat's mu before a token is a function of the tokens before it and their logits. It is stored per position, so
    values after rejected drafts are overwritten like the tokens.
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
        """Filter by mu, and update it with the surprise of the token that will be drawn."""
        mus = self._mus[one.row]
        mu = mus[one.column % _NUM_PLACES].view(1, 1)
        _scale(logits, params.temperature)
        if params.mirostat == 1:
            _drop_by_zipf(logits, mu)
        else:
            _drop_by_surprise(logits, mu)
        key = torch.tensor([[one.seed, one.place]], device=self._device)
        chosen = ops.sample_tokens(logits, self._neutral, key, NO_LIMITS)
        prob = _probs(logits).gather(1, chosen.clamp(min=0)[:, None])
        error = -prob.log2() - params.mirostat_tau
        following = (mu - params.mirostat_eta * error).view(())
        mus[(one.column + 1) % _NUM_PLACES] = following.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def neutral_settings(vocab_size: int) -> tuple[float, float, float, float]:
    """Return settings of `ops.sample_tokens` that draw from the logits as they are."""
    return 1.0, -np.inf, float(vocab_size), 1.0
