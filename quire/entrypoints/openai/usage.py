"""Counts the tokens of one HTTP request, and the time that they took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from quire.entrypoints.openai.notes import Notes
from quire.entrypoints.openai.protocol.responses import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Timings,
    Usage,
)
from quire.outputs import CompletionOutput, RequestOutput, RequestStateStats, joined_stats


class UsageMeter:
    """Adds up outputs; each must carry only tokens that no earlier one carried.

    Args:
        prompt_lengths: tokens of each prompt, which are known before there is an output.
    """

    def __init__(self, prompt_lengths: Sequence[int] = ()) -> None:
        self._prompt_tokens = dict(enumerate(prompt_lengths))
        self._latest: dict[int, RequestOutput] = {}
        self._completion_tokens = 0
        self.reasoning_tokens: int | None = None
        """Those of the completion tokens that were reasoning; None if the model does not reason."""
        self._sequences: set[tuple[int, int]] = set()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in an output with all of its completions."""
        self.add_prompt(prompt_index, output)
        for completion in output.outputs:
            self.add_completion(prompt_index, completion)

    def add_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in an output, but not its completions."""
        self._latest[prompt_index] = output

    def add_completion(self, prompt_index: int, completion: CompletionOutput) -> None:
        """Take in the tokens of one completion."""
        self._sequences.add((prompt_index, completion.index))
        self._completion_tokens += len(completion.token_ids)

    def usage(self) -> Usage:
        latest = self._latest
        known = self._prompt_tokens | {index: len(one.prompt_token_ids) for index, one in latest.items()}
        num_prompt_tokens, num_cached_tokens = (
            sum(known.values()),
            sum(one.num_cached_tokens for one in latest.values()),
        )
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=num_prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
            completion_tokens_details=self._completion_details(),
        )

    def _completion_details(self) -> CompletionTokensDetails | UnsetType:
        times = self._times()
        details = CompletionTokensDetails(self.reasoning_tokens or 0)
        if times.num_draft_tokens:
            details.accepted_prediction_tokens = times.num_accepted_tokens
            details.rejected_prediction_tokens = times.num_draft_tokens - times.num_accepted_tokens
        elif self.reasoning_tokens is None:
            return UNSET
        return details

    def _times(self) -> RequestStateStats:
        return joined_stats([output.metrics for output in self._latest.values()])

    def timings(self) -> Timings:
        """Of all that was added."""
        return timings_of(self._times(), max(0, self._completion_tokens - len(self._sequences)))

    def closing(self, notes: Notes) -> dict[str, Any]:
        """What the last object of a reply has that no earlier one can have."""
        return {
            "usage": self.usage(),
            "timings": self.timings(),
            "ignored": notes.ignored or UNSET,
            "adjusted": notes.adjusted or UNSET,
        }


def timings_of(times: RequestStateStats, num_later_tokens: int = 0) -> Timings:
    """With so many tokens after first ones; a time that is not known (nothing was generated) is 0."""
    started = times.scheduled_ts or times.arrival_time
    first = times.first_token_ts or started
    decode_s = max(0.0, times.last_token_ts - first)
    return Timings(
        queue_s=round(max(0.0, started - times.arrival_time), 6),
        prefill_s=round(max(0.0, first - started), 6),
        decode_s=round(decode_s, 6),
        tokens_per_s=round(num_later_tokens / decode_s, 3) if decode_s else 0.0,
    )
