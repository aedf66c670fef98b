# SPDX-License-Identifier: Apache-2.0
"""CPU budget of a request's masks, and a greedy tokenizer."""

from __future__ import annotations

from quire.structured_outputs_params import StructuredOutputsParams

LEAST_MS = 0.5  # least mean per text of a request with many texts
BURST_MS = 250.0  # allowance beyond the mean, for lexer states built once
BURST_MS_PER_KIB = (
    20.0  # of the constraint's text: many alternatives are expensive where all of them are possible
)


class MaskBudget:
    """CPU budget of one request: `mask_time_ms` per step of all its texts together, plus a burst.

    Invariant: the steps of a request delay others by at most a burst plus the mean, or `LEAST_MS` times its number of
    texts. Time of other threads and processes does not count.

    Args:
        params: normalized constraint, whose size decides the burst.
        mean_ms: `mask_time_ms`.
    """

    def __init__(self, params: StructuredOutputsParams, mean_ms: float) -> None:
        self._mean_ms = mean_ms
        self._num_texts = 0
        self._burst_ms = BURST_MS + BURST_MS_PER_KIB * len(params.key) / 1024
        self._left_ms = self._burst_ms

    def add_text(self) -> None:
        """Count one more text of the request; `n` asks for several."""
        self._num_texts += 1

    def remove_text(self) -> None:
        """Count one text less: finished or preempted."""
        self._num_texts -= 1

    def charge(self, spent_ns: int, num_steps: int) -> None:
        """Charge the CPU time of some steps; a step makes one mask or reads one token."""
        mean_ms = max(self._mean_ms / max(self._num_texts, 1), min(LEAST_MS, self._mean_ms))
        self._left_ms = min(self._left_ms + num_steps * mean_ms - spent_ns / 1e6, self._burst_ms)

    @property
    def is_spent(self) -> bool:
        return self._left_ms < 0

    @property
    def refusal(self) -> str:
        """Reason for the client once the budget is spent."""
        return (
            f"computing the allowed tokens takes more than {self._mean_ms:g} ms of CPU time per step; make the grammar "
            "less ambiguous, with only one way to derive a text, or the constraint smaller"
        )


class LongestTokens:
    """Greedy longest-match tokenizer.

    Args:
        tokens: bytes of each token, by id.
    """

    def __init__(self, tokens: list[bytes]) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(tokens) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize a text greedily, up to where no token matches."""
        ids: list[int] = []
        place = 0
        while place < len(text):
            sizes = range(min(self._longest, len(text) - place), 0, -1)
            size = next((size for size in sizes if text[place : place + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[place : place + size]])
            place += size
        return ids
