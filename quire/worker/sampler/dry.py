# SPDX-License-Identifier: Apache-2.0
"""DRY sampler: lowers tokens that would continue a repetition, the more the longer it is.

Defined as llama.cpp's sampler `dry`, after p-e-w's proposal for text-generation-webui (pull request 5677).

Invariant: a penalty is a function of the tokens before a sample, prompt included; `Suffixes` is only a cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import LogitsFeature, flat_indices

Tokens = NDArray[np.int32]
_MOST_STEPS = 64  # tokens added one by one; more are matched from scratch
_MAX_LOG = math.log(np.finfo(np.float32).max)
_MIN_LOGIT = float(np.finfo(np.float32).min)


class Suffixes:
    """Length, for each position of a growing sequence, of the longest common suffix with the whole sequence."""

    def __init__(self) -> None:
        self._lengths = np.zeros(0, dtype=np.int64)

    def at_end_of(self, tokens: Tokens) -> NDArray[np.int64]:
        """Return the lengths [n - 1] by position for tokens [n], which extend those of the last call.

        A shorter sequence is matched from scratch.
        """
        known = len(self._lengths) + 1
        if not known <= len(tokens) <= known + _MOST_STEPS:
            self._lengths = _matched(tokens)
        for count in range(len(self._lengths) + 1, len(tokens)):
            self._lengths = _next(self._lengths, tokens[: count + 1])
        return self._lengths

    def behind(self, tokens: Tokens, num_drafts: int) -> NDArray[np.int64]:
        """Return the lengths for tokens [n] whose last are drafts, which are not cached."""
        lengths = self.at_end_of(tokens[: len(tokens) - num_drafts])
        for count in range(len(lengths) + 1, len(tokens)):
            lengths = _next(lengths, tokens[: count + 1])
        return lengths


def _next(lengths: NDArray[np.int64], tokens: Tokens) -> NDArray[np.int64]:
    """Return the lengths for tokens [n] from those for all but the last token."""
    longer = np.concatenate((np.zeros(1, dtype=np.int64), lengths)) + 1
    return np.where(tokens[:-1] == tokens[-1], longer[: len(tokens) - 1], 0)


def _matched(tokens: Tokens) -> NDArray[np.int64]:
    """Return the lengths for tokens [n]: Z-values of the reversed sequence (Gusfield 1997, section 1.4)."""
    text = tokens[::-1].tolist()
    count, left, right = len(text), 0, 0
    values = [0] * count
    for place in range(1, count):
        size = min(values[place - left], right - place) if place < right else 0
        while place + size < count and text[size] == text[place + size]:
            size += 1
        values[place] = size
        if place + size > right:
            left, right = place, place + size
    return np.array(values[1:][::-1], dtype=np.int64)


class _DryRow(NamedTuple):
    """Settings of a request, and its suffix lengths."""

    params: SamplingParams
    is_single: NDArray[np.bool_]
    """[V] True for tokens that are a breaker by themselves."""
    longer: list[tuple[frozenset[int], tuple[int, ...]]]
    """Other breakers: any head token, followed by the tail."""
    suffixes: Suffixes

    @classmethod
    def from_params(cls, params: SamplingParams, vocab_size: int) -> _DryRow:
        is_single = np.zeros(vocab_size, dtype=np.bool_)
        for breaker in params.dry_breakers:
            if not breaker.tail:
                heads = np.array(breaker.heads, dtype=np.int64)
                is_single[heads[heads < vocab_size]] = True
        longer = [(frozenset(one.heads), one.tail) for one in params.dry_breakers if one.tail]
        return cls(params, is_single, longer, Suffixes())

    def penalties(self, tokens: Tokens, num_drafts: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the tokens to lower after tokens [n], and by how much."""
        params, count = self.params, len(tokens)
        last_n = params.dry_penalty_last_n
        start = max(0, count - last_n) if last_n > 0 else 0
        allowed = params.dry_allowed_length
        lengths = self.suffixes.behind(tokens, num_drafts)
        window = tokens[start:]
        if len(window) <= allowed:
            return _NO_TOKENS, _NO_AMOUNTS
        limit = self._since_breaker(window)
        if limit < allowed:
            return _NO_TOKENS, _NO_AMOUNTS
        within = np.minimum(lengths[start:], np.arange(1, len(window)))
        repeated = np.minimum(within, limit)
        is_long = repeated >= allowed
        followers, longest = _longest_by_token(window[1:][is_long], repeated[is_long])
        is_penalized = ~self.is_single[followers]
        exponents = longest[is_penalized] - allowed
        if params.dry_base > 1.000001:
            exponents = np.minimum(exponents, int(_MAX_LOG / math.log(params.dry_base)))
        return followers[is_penalized], params.dry_multiplier * params.dry_base ** exponents.astype(
            np.float64
        )

    def _since_breaker(self, window: Tokens) -> int:
        """Return how many tokens follow the last breaker that begins in a window [n]; n without one."""
        count = len(window)
        begins = self.is_single[window]
        for heads, tail in self.longer:
            begins |= _begins(window, heads, tail)
        found = np.flatnonzero(begins)
        if not len(found):
            return count
        place = int(found[-1])
        longest = max(
            (len(tail) for heads, tail in self.longer if _is_at(window, place, heads, tail)), default=0
        )
        return count - 1 - place - longest


_NO_TOKENS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_NO_AMOUNTS: NDArray[np.float64] = np.zeros(0)


def _begins(window: Tokens, heads: frozenset[int], tail: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return where a breaker begins in a window [n]."""
    found = np.zeros(len(window), dtype=np.bool_)
    ends = np.flatnonzero(window[len(tail) :] == tail[-1])  # tail matches are few, heads may be many
    found[[place for place in ends.tolist() if _is_at(window, place, heads, tail)]] = True
    return found


def _is_at(window: Tokens, place: int, heads: frozenset[int], tail: tuple[int, ...]) -> bool:
    return int(window[place]) in heads and tuple(window[place + 1 : place + 1 + len(tail)].tolist()) == tail


def _longest_by_token(
    tokens: Tokens, lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct tokens and the greatest length of each."""
    distinct, places = np.unique(tokens, return_inverse=True)
    longest = np.zeros(len(distinct), dtype=np.int64)
    np.maximum.at(longest, places, lengths)
    return distinct.astype(np.int64), longest


class StagedAmounts(NamedTuple):
    """Numbers to subtract from some logits."""

    flat: Tensor
    """[M] indices into the flattened logits."""
    amounts: Tensor
    """[M] float64."""


class Dry(LogitsFeature[StagedAmounts]):
    """Makes tokens that extend a repetition less likely."""

    reads_tokens = True

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._vocab_size = vocab_size
        self._rows: dict[int, _DryRow] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.uses_dry

    def _store(self, row: int, request: NewRequestData) -> None:
        self._rows[row] = _DryRow.from_params(request.sampling_params, self._vocab_size)

    def _forget(self, row: int) -> None:
        del self._rows[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedAmounts | None:
        found = [self._of_sample(int(samples.rows[i]), int(samples.columns[i])) for i in users]
        flat = flat_indices(users, [tokens for tokens, _ in found], self._vocab_size)
        if not len(flat):
            return None
        return StagedAmounts(flat, torch.from_numpy(np.concatenate([amounts for _, amounts in found])))

    def _of_sample(self, row: int, column: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        num_drafts = max(0, column - int(self._batch.num_tokens[row]))
        return self._rows[row].penalties(self._batch.token_ids[row, :column], num_drafts)

    def apply(self, logits: Tensor, staged: StagedAmounts) -> None:
        flat = logits.view(-1)
        lowered = flat[staged.flat].double()
        # An impossible token stays impossible, and a huge penalty makes no other token impossible.
        flat[staged.flat] = torch.where(
            lowered == -torch.inf, lowered, (lowered - staged.amounts).clamp(min=_MIN_LOGIT)
        ).float()
