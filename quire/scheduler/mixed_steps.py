# SPDX-License-Identifier: Apache-2.0
"""`MixedStepLimit`: most prompt tokens of a step, so that it ends in time for streams and arriving requests.

Invariant: pure; times come in as arguments, so a recorded run gives the same limits when it is replayed.
"""

from __future__ import annotations

from quire.scheduler.step import StepPlan

LEAST_TOKENS = 32
"""A step has room for so many prompt tokens, whatever they take: with fewer, reading weights would take most of it."""
FIRST_TOKENS = 256
"""Prompt tokens of steps until one was measured."""
ALONE = 4
"""Times the limit that a step may take while no request generates."""


class MixedStepLimit:
    """Number of prompt tokens with which the next step is expected to end in time.

    All streams wait for the whole step, of which a long prompt would take seconds on a CPU. Without streams, arriving
    requests and prompts that end wait for it; that matters less, so it may take `ALONE` times as long. A prompt token
    is expected to take its share of the last step that had at least `LEAST_TOKENS` of them.

    Args:
        most: prompt tokens of a step, whatever they take.
        max_s: seconds that a step may take while requests generate; 0: no limit.
    """

    def __init__(self, most: int, max_s: float) -> None:
        self._most = most
        self._max_s = max_s
        self._token_s = self._ended_ts = 0.0

    def num_tokens(self, *, is_mixed: bool) -> int:
        """Return the limit, at least 1; `is_mixed` if requests generate in the step."""
        if not self._max_s:
            return self._most
        max_s = self._max_s * (1 if is_mixed else ALONE)
        expected = max_s / self._token_s if self._token_s else FIRST_TOKENS
        return int(min(max(expected, LEAST_TOKENS), self._most))  # a float until here, as it may be infinite

    def note(self, step: StepPlan, now: float) -> None:
        """Measure a completed step, if it computed many prompt tokens; planned ahead, it began when the last ended."""
        if step.num_prompt_tokens >= LEAST_TOKENS:
            self._token_s = (now - max(step.planned_ts, self._ended_ts)) / step.num_prompt_tokens
        self._ended_ts = now
