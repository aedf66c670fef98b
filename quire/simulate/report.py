"""Summary of simulated runs: throughput, latencies, hit rate, memory; as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.bench.workload import mean, percentile
from quire.simulate.simulator import SimulatedRun

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of times in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def from_seconds(values: Sequence[float]) -> Spread:
        """Summarize seconds; all zero without values."""
        ms = [1e3 * value for value in values]
        return Spread(mean(ms), *(percentile(ms, percent) for percent in PERCENTS))


@dataclass(frozen=True)
class Summary:
    """Numbers of one simulated run.

    Args:
        name: varied option and its value.
        duration_s: from the first arrival to the last token.
        requests_per_s, output_tokens_per_s, total_tokens_per_s: throughput over this time.
        ttft_ms: time to first token. `itl_ms`: between two outputs of a request. `e2e_ms`: of whole requests.
        hit_rate: fraction of prompt tokens found in the prefix cache.
        peak_running, peak_waiting: most requests at once. `peak_cache_usage`: fraction of the KV cache in use.
        cache_mib: size of the KV cache.
    """

    name: str
    num_requests: int
    num_refused: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    hit_rate: float
    num_preemptions: int
    num_steps: int
    peak_running: int
    peak_waiting: int
    peak_cache_usage: float
    cache_mib: float

    def as_dict(self) -> dict[str, object]:
        """Return the numbers as plain data."""
        return dataclasses.asdict(self)


def summarize(name: str, run: SimulatedRun) -> Summary:
    """Summarize a run."""
    requests = [one for one in run.requests if one.num_output_tokens]
    started = min((one.arrival_s for one in requests), default=0.0)
    duration = max((one.last_s for one in requests), default=0.0) - started
    prompts = sum(one.num_prompt_tokens for one in requests)
    outputs = sum(one.num_output_tokens for one in requests)

    def per_s(count: int) -> float:
        return count / duration if duration else 0.0

    return Summary(
        name=name,
        num_requests=len(requests),
        num_refused=len(run.refused),
        duration_s=duration,
        requests_per_s=per_s(len(requests)),
        output_tokens_per_s=per_s(outputs),
        total_tokens_per_s=per_s(prompts + outputs),
        ttft_ms=Spread.from_seconds([one.first_s - one.arrival_s for one in requests]),
        itl_ms=Spread.from_seconds([gap for one in requests for gap in one.gaps_s]),
        e2e_ms=Spread.from_seconds([one.last_s - one.arrival_s for one in requests]),
        hit_rate=sum(one.num_cached_tokens for one in requests) / prompts if prompts else 0.0,
        num_preemptions=run.num_preemptions,
        num_steps=run.num_steps,
        peak_running=max((sample.num_running for sample in run.timeline), default=0),
        peak_waiting=max((sample.num_waiting for sample in run.timeline), default=0),
        peak_cache_usage=max((sample.cache_usage for sample in run.timeline), default=0.0),
        cache_mib=run.cache_bytes / 2**20,
    )


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "req/s": lambda one: f"{one.requests_per_s:.2f}",
    "out tok/s": lambda one: f"{one.output_tokens_per_s:.0f}",
    "TTFT p50": lambda one: f"{one.ttft_ms.p50:.0f}",
    "p99 ms": lambda one: f"{one.ttft_ms.p99:.0f}",
    "ITL p50": lambda one: f"{one.itl_ms.p50:.1f}",
    "p99 ms ": lambda one: f"{one.itl_ms.p99:.1f}",
    "hits": lambda one: f"{one.hit_rate:.0%}",
    "preempted": lambda one: str(one.num_preemptions),
    "running": lambda one: str(one.peak_running),
    "waiting": lambda one: str(one.peak_waiting),
    "cache": lambda one: f"{one.peak_cache_usage:.0%} of {one.cache_mib:.0f} MiB",
}  # Heading -> cell of a summary.


def table(summaries: Sequence[Summary]) -> list[str]:
    """Return a table with one row per run."""
    rows = [["", *COLUMNS], *([one.name, *(cell(one) for cell in COLUMNS.values())] for one in summaries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_aligned(row, widths)) for row in rows]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield cells padded to the widths: the first to the left, numbers to the right."""
    yield row[0].ljust(widths[0])
    for cell, width in zip(row[1:], widths[1:], strict=True):
        yield cell.rjust(width)
