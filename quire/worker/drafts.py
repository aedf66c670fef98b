"""Drafts: guesses of a request's next tokens, which a step verifies all at once.

Invariant: what a request gets is what it would have got without drafts. Behind each draft the step samples what it
would sample if all tokens before were the request's, and that counts only where they are. So verifying is comparing,
and whether a request is greedy or random, and what shapes its choice, is nobody's business here.

After Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), with the sampled token
itself in the place of a test that only keeps its distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Drafter(Protocol):
    """Guesses what follows. A guess costs time if it is wrong, and nothing else."""

    def propose(self, known: Mapping[str, NDArray[np.int32]]) -> dict[str, list[int]]:
        """The tokens of requests that have just sampled, which it must not change, -> what may follow them.

        Args:
            known: request id -> all its tokens, of prompt and output.
        """


def count_kept(sampled: Sequence[int], drafts: Sequence[int], is_bad: Sequence[bool]) -> int:
    """How many tokens of a request count: those that its first drafts agree with, and the one behind them.

    Where nothing could be sampled, the tokens before count, and the next step finds out again.

    Args:
        sampled: [1 + k] tokens, the first of which stands where the first draft does.
        drafts: [k].
        is_bad: [1 + k] whether there is no such token; the first is there.
    """
    for place, draft in enumerate(drafts):
        if sampled[place] != draft or is_bad[place + 1]:
            return place + 1
    return len(sampled)
