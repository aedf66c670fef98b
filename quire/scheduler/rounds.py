# SPDX-License-Identifier: Apache-2.0
"""`RoundLimit`: most decode rounds of a plan.

Invariant: pure; times come in as arguments, so a recorded run gives the same limits when it is replayed.
"""

from __future__ import annotations

import enum

from quire.kv_cache.spec import KVCacheConfig
from quire.scheduler.output import ModelRunnerOutput
from quire.scheduler.step import StepPlan


class RoundBound(enum.Enum):
    """Bound on the tokens of a request in a plan; the value is the sentence for a person."""

    MOST = "the most of --num-scheduler-steps"
    TIME = "a step takes {:.1f} ms, and all of them may take {:.0f} (--max-multi-step-s)"
    REFUSED = "a request needs what multi-step decode cannot do, such as logprobs, penalties or a grammar"
    WAITING = "a request waits"
    BLOCKS = "KV cache blocks are short"
    PROMPT = "a prompt is computed, or drafts are verified"
    STREAMED = "a request is streamed (--no-multi-step-streams)"
    END = "a request reaches max_tokens or the end of the context"


class RoundLimit:
    """Number of rounds of the next plan that are expected to end in time.

    A round is expected to take as long as those of the last step that only decoded. If the worker ran one round of
    several though no request ended, some request needs what rounds cannot do, and the next plans have one. Both keep
    plans from allocating blocks for rounds that will not run. The worker decides what a round can do and, by its
    clock, when the time is up.

    Args:
        most: rounds of a plan, whatever they take; at least 1.
        max_s: seconds that all rounds of a plan may take together.
    """

    def __init__(self, most: int, max_s: float) -> None:
        self._most = most
        self._max_s = max_s
        self._round_s = 0.0  # until a step was measured, any number of rounds is expected to end in time
        self._num_single = 0  # next plans that are of one round

    def limit(self) -> tuple[int, RoundBound]:
        """Return the limit, at least 1, and its bound."""
        if self._num_single:
            return 1, RoundBound.REFUSED
        if self._round_s * self._most <= self._max_s:
            return self._most, RoundBound.MOST
        return max(int(self._max_s / self._round_s), 1), RoundBound.TIME

    def sentence(self, num_rounds: int, bound: RoundBound) -> str:
        """Describe the tokens of a request in a plan, for a person."""
        why = bound.value.format(self._round_s * 1e3, self._max_s * 1e3)
        return f"up to {num_rounds} token{'s' if num_rounds > 1 else ''} of each request per plan: {why}"

    def note(self, step: StepPlan, output: ModelRunnerOutput, now: float) -> None:
        """Measure a completed step, if it only decoded."""
        if self._most == 1 or not step.only_decodes:
            return
        num_rounds = max(map(len, output.sampled_token_ids.values()), default=1)
        self._round_s = (now - step.planned_ts) / num_rounds
        is_refused = num_rounds == 1 < step.max_decode_steps
        if is_refused and not any(chunk.request.is_finished for chunk in step.chunks):
            self._num_single = self._most
        else:
            self._num_single = max(self._num_single - 1, 0)


def most_rounds(asked: int, kv_config: KVCacheConfig) -> int:
    """Return the most tokens of a request that a plan may generate, one after the other.

    A state has a block at the first and the last of these, and perhaps none between, so they span two at most.
    """
    return max(asked if kv_config.rolls_back else min(asked, kv_config.block_size), 1)
