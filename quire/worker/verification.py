# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts: which of the sampled tokens of a step count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.worker.input_batch import InputBatch
from quire.worker.sampler import SamplerOutput

if TYPE_CHECKING:
    from quire.worker.launched_step import SampledTokens, StepOutcome


def read_verified(
    samples: SampledTokens, output: SamplerOutput, batch: InputBatch, outcome: StepOutcome
) -> None:
    """Fill the outcome where requests have drafts: only the samples up to the first rejection count."""
    tokens = output.token_ids.tolist()
    indices, firsts = _firsts(samples)
    for index, first in zip(indices.tolist(), firsts.tolist(), strict=True):
        drafts = samples.drafts.get(index, [])
        is_bad = [sample in output.failed for sample in range(first, first + 1 + len(drafts))]
        sampled = tokens[first : first + 1 + len(drafts)]
        outcome.token_ids[index] = sampled[: count_kept(sampled, drafts, is_bad)]
        if first in output.failed:
            outcome.failed[index] = output.failed[first]
        if first in output.logprobs:
            last = first + len(outcome.token_ids[index])
            outcome.logprobs[index] = [output.logprobs[sample] for sample in range(first, last)]
    drafted = [place for place, index in enumerate(indices.tolist()) if index in samples.drafts]
    num_kept = [len(outcome.token_ids[index]) for index in indices[drafted].tolist()]
    batch.keep(samples.places.at(firsts[drafted]), np.array(num_kept))


def known_tokens(
    sampled: SampledTokens, batch: InputBatch, outcome: StepOutcome
) -> dict[int, NDArray[np.int32]]:
    """Return all tokens up to those of the outcome, for the requests that continue."""
    indices, firsts = _firsts(sampled)
    rows, columns, generations, _ = sampled.places.at(firsts)
    return {
        index: batch.token_ids[row, : column + len(outcome.token_ids[index])]
        for index, row, column, generation in zip(indices.tolist(), rows, columns, generations, strict=True)
        if index not in outcome.failed and generation == batch.generations[row]
    }


def _firsts(sampled: SampledTokens) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [R] each request that sampled and the index of its first sample; its samples are adjacent."""
    is_first = np.ones(len(sampled.indices), dtype=np.bool_)
    np.not_equal(sampled.indices[1:], sampled.indices[:-1], out=is_first[1:])
    firsts = is_first.nonzero()[0]
    return sampled.indices[firsts], firsts


def count_kept(sampled: Sequence[int], drafts: Sequence[int], is_bad: Sequence[bool]) -> int:
    """Return how many sampled tokens count: those that agree with the first drafts, and the next one.

    Where sampling failed, the tokens before count, and the next step fails again if it must.

    Args:
        sampled: [1 + k] tokens; the first is at the first draft's position.
        drafts: [k] draft tokens.
        is_bad: [1 + k] True where sampling failed; the first counts in any case.
    """
    for place, draft in enumerate(drafts):
        if sampled[place] != draft or is_bad[place + 1]:
            return place + 1
    return len(sampled)
