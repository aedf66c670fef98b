"""What the load generator measured, and the metrics made of it.

TTFT: send to first token. TPOT: time per token after the first. ITL: gap between two events of a stream.

Invariant: measured times are seconds since the start of the run; reported times are milliseconds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.bench.statistics import mean, percentile, standard_deviation

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
}
WIDTH = 50


@dataclass
class RequestRecord:
    """One request: when it was sent, when its events came, its tokens; `error` says why it failed."""

    sent_s: float
    event_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.event_times_s[0] - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.event_times_s)]

    @property
    def tpot_s(self) -> float:
        return (self.event_times_s[-1] - self.event_times_s[0]) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class ServeResult:
    """All requests of one run of `duration_s` seconds."""

    records: Sequence[RequestRecord]
    duration_s: float
    request_rate: float
    max_concurrency: int | None

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is None]

    @property
    def failed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is not None]

    def times_ms(self) -> dict[str, list[float]]:
        """Metric -> its values in milliseconds over the completed requests."""
        done = [record for record in self.completed if record.event_times_s]
        return {
            "ttft": [1000 * record.ttft_s for record in done],
            "tpot": [1000 * record.tpot_s for record in done if record.num_output_tokens > 1],
            "itl": [1000 * gap for record in done for gap in record.itl_s],
        }

    def as_json(self) -> dict[str, float | None]:
        """The result for programs."""
        done = self.completed
        num_input, num_output = sum(r.num_prompt_tokens for r in done), sum(r.num_output_tokens for r in done)
        totals: dict[str, float | None] = {
            "duration": self.duration_s,
            "completed": len(done),
            "failed": len(self.failed),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": len(done) / self.duration_s,
            "output_throughput": num_output / self.duration_s,
            "total_token_throughput": (num_input + num_output) / self.duration_s,
            "max_output_tokens_per_s": peak_tokens_per_s(done),
            "max_concurrent_requests": peak_concurrency(done),
            "request_rate": self.request_rate if self.request_rate != float("inf") else None,
            "max_concurrency": self.max_concurrency,
        }
        for name, values in self.times_ms().items():
            totals |= _summary(name, values)
        return totals

    def lines(self) -> list[str]:
        """The result for people."""
        result = self.as_json()
        rows = [" Serving Benchmark Result ".center(WIDTH, "=")]
        rows += [_row(label, result[key]) for label, key in _TOTALS.items() if result[key] is not None]
        for name, title in TITLES.items():
            rows.append(title.center(WIDTH, "-"))
            for statistic in ("mean", "median", "p99"):
                label = f"{statistic.capitalize()} {name.upper()} (ms):"
                rows.append(_row(label, result[f"{statistic}_{name}_ms"]))
        return [*rows, "=" * WIDTH]


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests in flight at once."""
    changes = [(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def peak_tokens_per_s(records: Sequence[RequestRecord]) -> float:
    """Most tokens in one whole second of the run; a request's tokens are spread evenly over its events."""
    seconds: Counter[int] = Counter()
    tokens: dict[int, float] = {}
    for record in records:
        seconds.clear()
        seconds.update(int(time_s) for time_s in record.event_times_s)
        for second, num_events in seconds.items():
            share = num_events / len(record.event_times_s)
            tokens[second] = tokens.get(second, 0.0) + share * record.num_output_tokens
    return max(tokens.values(), default=0.0)


def _summary(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"mean_{name}_ms": mean(values),
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": standard_deviation(values),
        f"p99_{name}_ms": percentile(values, 99),
    }


_TOTALS = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak output token throughput (tok/s):": "max_output_tokens_per_s",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total token throughput (tok/s):": "total_token_throughput",
}


def _row(label: str, value: float | None) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40}{shown:>10}"
