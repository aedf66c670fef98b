# SPDX-License-Identifier: Apache-2.0
"""`MixedStepLimit`: most prompt tokens of a step in which other requests generate.

Invariant: pure; times come in as arguments, so a recorded run gives the same limits when it is replayed.
"""

from __future__ import annotations

from quire.scheduler.step import StepPlan

LEAST_TOKENS = 32
"""A step has room for so many prompt tokens, whatever they take: with fewer, reading weights would take most of it."""
FIRST_TOKENS = 256
"""Prompt tokens of mixed steps until one was measured."""


class MixedStepLimit:
    """Number of prompt tokens with which the next step is expected to end in time.

    All streams wait for the whole step, of which a long prompt would take seconds on a CPU. A prompt token is expected
    to take its share of the last step that had at least `LEAST_TOKENS` of them.

    Args:
        most: prompt tokens of a step, whatever they take.
        max_s: seconds that a step may take; 0: no limit.
    """

    def __init__(self, most: int, max_s: float) -> None:
        self._most = most
        self._max_s = max_s
        self._token_s = 0.0

    def num_tokens(self) -> int:
        """Return the limit, at least 1."""
        if not self._max_s:
            return self._most
        expected = self._max_s / self._token_s if self._token_s else FIRST_TOKENS
        return int(min(max(expected, LEAST_TOKENS), self._most))  # a float until here, as it may be infinite

    def note(self, step: StepPlan, now: float) -> None:
        """Measure a completed step, if it computed many prompt tokens."""
        if step.num_prompt_tokens >= LEAST_TOKENS:
            self._token_s = (now - step.planned_ts) / step.num_prompt_tokens
