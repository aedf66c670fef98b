# SPDX-License-Identifier: Apache-2.0
"""Accounting of a request's waiting time by cause.

Invariant: times are whole nanoseconds, and each interval is closed where the next begins, so the shares add up to the
wait exactly. The accounting costs something only when a cause changes.
"""

from __future__ import annotations

import enum

import msgspec

from quire.adapters import LIMIT_FLAG


class Cause(enum.Enum):
    """Cause that keeps a request from being computed at full speed; the value is the sentence for a person."""

    NEXT_STEP = "for the running step to end"
    TOKEN_BUDGET = "for room in the step's token budget"
    SEQUENCE_CAP = "for a place among the running requests (--max-num-seqs)"
    BLOCKS = "for KV cache blocks, short by {}"
    ADAPTER = f"for one of the adapters in use to be done with ({LIMIT_FLAG})"
    SHARED_PROMPT = "for the prompt that it shares to be computed"
    NOT_READY = "for {} to be ready"
    ENCODER_ROOM = "for room among the embeddings of other requests (--encoder-cache-gb)"
    BEHIND = "behind earlier requests"
    LOWER_PRIORITY = "while more urgent requests went ahead"
    FAIRNESS_DEBT = "while tenants that were given less went ahead"
    PREEMPTED = "preempted by {}"
    ASLEEP = "while the engine was asleep"
    LONG_PREFILL_CAP = (
        "prompt cut for steps to end in time (--max-mixed-step-s, --long-prefill-token-threshold)"
    )


class WaitShare(msgspec.Struct, frozen=True):
    """Time attributed to one cause; `text` is the sentence for a person, with the last known detail."""

    cause: str
    duration_ns: int
    text: str


class Explanation(msgspec.Struct, frozen=True):
    """Breakdown of the time a request spent before and between its steps.

    `shares` add up to `waited_ns`. `cause` is the present cause; None while the request is computed or once it has
    finished. `num_ahead` counts the waiting requests that would start before it. `pace` says how many tokens of a
    running request the last plan had, and why no more. Only the request's tenant may read it.
    """

    request_id: str
    status: str
    waited_ns: int
    shares: list[WaitShare]
    cause: str | None = None
    num_ahead: int = 0
    num_preemptions: int = 0
    tenant: str = ""
    pace: str = ""

    def __str__(self) -> str:
        ahead = f", {self.num_ahead} ahead of it" if self.cause else ""
        lines = [f"{self.request_id} ({self.status}{ahead}) waited {self.waited_ns / 1e9:.3f} s"]
        lines += [f"  {share.duration_ns / 1e9:9.3f} s  {share.text}" for share in self.shares]
        return "\n".join([*lines, f"  {self.pace}"] if self.pace else lines)


class WaitLog:
    """Waiting time of one request by cause; `cause` is the present one, None while nothing blocks it."""

    __slots__ = ("_details", "_ns", "_since_ns", "cause")

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self._since_ns = 0
        self._ns: dict[Cause, int] = {}
        self._details: dict[Cause, int | str] = {}

    def enter(self, cause: Cause | None, now: float, detail: int | str = "") -> None:
        """Record the cause that applies from `now` (monotonic seconds) on."""
        if cause is not self.cause:
            now_ns = _to_ns(now)
            if self.cause is not None:
                self._ns[self.cause] = self._ns.get(self.cause, 0) + now_ns - self._since_ns
            self.cause, self._since_ns = cause, now_ns
        if cause is not None and detail:
            self._details[cause] = detail

    def shares(self, now: float) -> list[WaitShare]:
        """Return every cause so far, the longest first."""
        totals = dict(self._ns)
        if self.cause is not None:
            totals[self.cause] = totals.get(self.cause, 0) + _to_ns(now) - self._since_ns
        ordered = sorted(((c, ns) for c, ns in totals.items() if ns), key=lambda item: -item[1])
        return [WaitShare(c.name.lower(), ns, c.value.format(self._details.get(c, ""))) for c, ns in ordered]


def _to_ns(seconds: float) -> int:
    return round(seconds * 1e9)
