"""CPU time that the masks of one request may take.

Invariant: whatever came before, the steps of a request delay others by no more than a burst and the mean, or so many
times `LEAST_MS` as it has texts; time that other threads and processes take is not counted.
"""

from __future__ import annotations

from quire.structured_output.params import StructuredOutputsParams

LEAST_MS = 0.5  # mean of each of many texts of a request
BURST_MS = 250.0  # beyond the mean, for states of the lexer that are built once
BURST_MS_PER_KIB = (
    20.0  # of the constraint's text: many alternatives are expensive where all of them are possible
)


class MaskBudget:
    """Account of one request: `mask_time_ms` for each step that its texts take together, and a burst beyond that.

    Args:
        params: the settled constraint, whose size decides the burst.
        mean_ms: `mask_time_ms`.
    """

    def __init__(self, params: StructuredOutputsParams, mean_ms: float) -> None:
        self._mean_ms = mean_ms
        self._num_texts = 0
        self._burst_ms = BURST_MS + BURST_MS_PER_KIB * len(params.key) / 1024
        self._left_ms = self._burst_ms

    def add_text(self) -> None:
        """Count one more text of the request, which writes several where `n` asks for them."""
        self._num_texts += 1

    def remove_text(self) -> None:
        """Count one text less, which has ended or is preempted."""
        self._num_texts -= 1

    def charge(self, spent_ns: int, num_steps: int) -> None:
        """Count CPU time that some steps of a text took; a step makes one mask or reads one token."""
        mean_ms = max(self._mean_ms / max(self._num_texts, 1), min(LEAST_MS, self._mean_ms))
        self._left_ms = min(self._left_ms + num_steps * mean_ms - spent_ns / 1e6, self._burst_ms)

    @property
    def is_spent(self) -> bool:
        return self._left_ms < 0

    @property
    def refusal(self) -> str:
        """The reason for a client, once the budget is spent."""
        return (
            f"finding the tokens that may come next takes more than {self._mean_ms:g} ms of CPU time at each step; "
            "make the grammar less ambiguous, with one way only to derive a text, or the constraint smaller"
        )
