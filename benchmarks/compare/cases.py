# SPDX-License-Identifier: Apache-2.0
"""Cases to measure: the number of requests, their lengths, and which of their tokens count.

Invariant: every engine gets the same cases; a rate is tokens per second, and more is better.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

NUM_THREADS = 2
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 16


class Phase(Enum):
    """The tokens that count, and the time that they took."""

    PREFILL = "prompt tokens, until the first output token"
    DECODE = "output tokens after each request's first, with the time of the first taken off"
    WHOLE = "output tokens, from the first prompt token to the last output token"


@dataclass(frozen=True)
class Case:
    """`num_requests` prompts of `input_len` tokens that arrive together and get `output_len` tokens each."""

    name: str
    title: str
    num_requests: int
    input_len: int
    output_len: int
    phase: Phase

    @property
    def num_tokens(self) -> int:
        """The tokens that count."""
        per_request = {
            Phase.PREFILL: self.input_len,
            Phase.DECODE: self.output_len - 1,
            Phase.WHOLE: self.output_len,
        }
        return self.num_requests * per_request[self.phase]


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("prefill", "prefill 512", 1, 512, 1, Phase.PREFILL),
        Case("decode-1", "decode B=1", 1, 8, 65, Phase.DECODE),
        Case("decode-16", "decode B=16", 16, 8, 32, Phase.DECODE),
        Case("batch", "16 x 64 in / 32 out", 16, 64, 32, Phase.WHOLE),
    )
}
"""The columns of the table."""


def cases_named(names: Iterable[str]) -> list[Case]:
    """The cases of these names."""
    return [CASES[name] for name in names]
