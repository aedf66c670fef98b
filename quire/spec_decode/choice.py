"""How many guesses of each request to verify in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.spec_decode.step_costs import WIDEST, StepCosts


def choose_lengths(
    rates: Sequence[float], lengths: Sequence[int], num_requests: int, costs: StepCosts, num_ahead: int = 0
) -> list[int]:
    """The first so many guesses of each draft, such that a step gives the most tokens for its time.

    Args:
        rates: [D] probability that a guess of a draft is right if those before it are.
        lengths: [D] guesses there are.
        num_requests: that the step has in any case, a token each.
        costs: of steps.
        num_ahead: tokens of each draft that steps in flight sample anyway: they must be right, and cost nothing.
    """
    counts = [max(length - num_ahead, 0) for length in lengths]
    owners: NDArray[np.int64] = np.arange(len(rates)).repeat(counts)
    if len(owners) == 0 or num_requests >= WIDEST:
        return [0] * len(rates)
    gains = np.concatenate(
        [rate ** np.arange(num_ahead + 1, num_ahead + n + 1) for rate, n in zip(rates, counts, strict=True)]
    )
    order = (-gains).argsort(kind="stable")[: WIDEST - num_requests]
    tokens = num_requests + np.concatenate(([0.0], gains[order].cumsum()))
    best = int((tokens / costs.of(num_requests + np.arange(len(tokens)))).argmax())
    chosen = np.bincount(owners[order[:best]], minlength=len(rates)).tolist()
    return [count + num_ahead if count else 0 for count in chosen]
