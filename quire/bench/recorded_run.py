# SPDX-License-Identifier: Apache-2.0
"""Summary of a recorded run: steps, tokens, step times and waiting times.

Invariant: nothing is measured here; every number is a sum over frames.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from quire.bench.workload import mean, percentile
from quire.engine.trace import Added, Ended, Planned, Returned, Trace


@dataclass(frozen=True)
class RunSummary:
    """Sums over a run; times in seconds, `step_times` from the plan of a step to its result."""

    model: str
    policy: str
    duration: float
    num_added: int
    num_ended: Counter[str]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_sampled_tokens: int
    num_preemptions: int
    step_times: list[float]
    forward_s: float
    waits_ns: Counter[str]
    num_lost_bytes: int

    def lines(self) -> list[str]:
        """Return the summary as text."""
        times = [1e3 * seconds for seconds in self.step_times]
        spread = ", ".join(f"p{percent} {percentile(times, percent):.2f}" for percent in (50, 90, 99))
        ended = ", ".join(f"{count} {reason}" for reason, count in self.num_ended.most_common()) or "none"
        lines = [
            f"run of {self.model}, policy {self.policy}, {self.duration:.3f} s",
            f"requests  {self.num_added}, ended: {ended}; {self.num_preemptions} preemptions",
            (
                f"tokens    {self.num_prompt_tokens} of prompts ({self.num_cached_tokens} found in the prefix "
                f"cache), {self.num_sampled_tokens} sampled, {self.num_computed_tokens} computed"
            ),
            (
                f"steps     {len(times)}, ms from plan to result: mean {mean(times):.2f}, {spread}; "
                f"{self.forward_s:.3f} s in the forward pass"
            ),
            f"waits     {sum(self.waits_ns.values()) / 1e9:.3f} s in all",
        ]
        lines += [f"  {ns / 1e9:10.3f} s  {cause}" for cause, ns in self.waits_ns.most_common()]
        if self.num_lost_bytes:
            lines.append(f"the run was cut off; its last {self.num_lost_bytes} bytes are part of a frame")
        return lines


def summarize(trace: Trace) -> RunSummary:
    """Summarize a recorded run."""
    config = trace.header.config
    times = [frame.now for frame in trace.frames if isinstance(frame, Added | Planned | Returned)]
    added = [frame for frame in trace.frames if isinstance(frame, Added)]
    plans = {frame.step_id: frame for frame in trace.frames if isinstance(frame, Planned)}
    results = [frame for frame in trace.frames if isinstance(frame, Returned)]
    ends = [frame for frame in trace.frames if isinstance(frame, Ended)]
    waits: Counter[str] = Counter()
    for end in ends:
        waits.update(dict(end.waits))
    return RunSummary(
        model=config.model.model,
        policy=config.scheduler.scheduler_cls or config.scheduler.scheduling_policy,
        duration=max(times, default=0.0) - min(times, default=0.0),
        num_added=len(added),
        num_ended=Counter(end.finish_reason for end in ends),
        num_prompt_tokens=sum(len(frame.request.prompt_token_ids) for frame in added),
        num_cached_tokens=sum(end.num_cached_tokens for end in ends),
        num_computed_tokens=sum(sum(plan.num_tokens) for plan in plans.values()),
        num_sampled_tokens=sum(len(ids) for result in results for ids in result.sampled),
        num_preemptions=sum(end.num_preemptions for end in ends),
        step_times=[result.now - plans[result.step_id].now for result in results],
        forward_s=sum(result.forward_s for result in results),
        waits_ns=waits,
        num_lost_bytes=trace.num_lost_bytes,
    )
