"""What a benchmark asks for: random prompts and arrival times.

Invariant: everything follows from the seed; no clock and no global randomness.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence


def random_prompts(num_prompts: int, num_tokens: int, token_ids: Sequence[int], seed: int) -> list[list[int]]:
    """`num_prompts` prompts of `num_tokens` ids, each drawn evenly from `token_ids`."""
    generator = random.Random(seed)
    return [generator.choices(token_ids, k=num_tokens) for _ in range(num_prompts)]


def arrival_times(num_requests: int, rate_per_s: float, seed: int) -> list[float]:
    """Arrival times in seconds of a Poisson process that starts at 0; an infinite rate sends all at once."""
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    generator = random.Random(seed)
    gaps = (generator.expovariate(rate_per_s) for _ in range(num_requests - 1))
    return list(itertools.accumulate(gaps, initial=0.0))[:num_requests]
