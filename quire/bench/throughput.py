# SPDX-License-Identifier: Apache-2.0
"""Offline throughput of a batch of requests, and comparison of two backends on the same batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.bench.backends import Backend, Prompts

Clock = Callable[[], float]


@dataclass(frozen=True)
class ThroughputResult:
    """Result of one batch: seconds and numbers of tokens."""

    elapsed_time: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.elapsed_time

    @property
    def tokens_per_second(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.elapsed_time

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.elapsed_time

    def lines(self) -> list[str]:
        """Return the result as text."""
        rates = [
            f"{self.requests_per_second:.2f} requests/s",
            f"{self.tokens_per_second:.2f} total tokens/s",
            f"{self.output_tokens_per_second:.2f} output tokens/s",
        ]
        return [
            f"Throughput: {', '.join(rates)}",
            f"Total num prompt tokens:  {self.num_prompt_tokens}",
            f"Total num output tokens:  {self.num_output_tokens}",
        ]

    def as_json(self) -> dict[str, float]:
        """Return the result; rates are per second."""
        return {
            "elapsed_time": self.elapsed_time,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second,
            "output_tokens_per_second": self.output_tokens_per_second,
        }


def measure(
    backend: Backend, prompts: Prompts, output_len: int, clock: Clock = time.perf_counter
) -> ThroughputResult:
    """Time one batch."""
    start_s = clock()
    generated = backend.generate(prompts, output_len)
    elapsed_s = clock() - start_s
    return ThroughputResult(elapsed_s, len(prompts), sum(map(len, prompts)), sum(map(len, generated)))


def warm_up(backend: Backend, prompts: Prompts) -> None:
    """Generate two tokens for one prompt, reversed so that no prefix is cached."""
    backend.generate([prompts[0][::-1]], 2)


@dataclass(frozen=True)
class Comparison:
    """Repeated results of two backends over the same batches."""

    names: tuple[str, str]
    results: tuple[Sequence[ThroughputResult], Sequence[ThroughputResult]]

    def medians(self) -> tuple[float, float]:
        """Return the median output tokens per second of each backend."""
        first, second = (
            statistics.median(one.output_tokens_per_second for one in many) for many in self.results
        )
        return first, second

    @property
    def ratio(self) -> float:
        """Speedup of the first backend over the second, by medians."""
        first, second = self.medians()
        return first / second

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        medians = zip(self.names, self.results, self.medians(), strict=True)
        rows = [
            f"{name:6} {_rates(many)}, median {median:.2f} output tokens/s" for name, many, median in medians
        ]
        return [*rows, f"Ratio of medians, {self.names[0]} to {self.names[1]}: {self.ratio:.3f}"]

    def as_json(self) -> dict[str, object]:
        repeats = {
            name: [one.as_json() for one in many] for name, many in zip(self.names, self.results, strict=True)
        }
        return {"repeats": repeats, "ratio_of_medians": self.ratio}


def compare(
    first: Backend,
    second: Backend,
    batches: Sequence[Prompts],
    output_len: int,
    clock: Clock = time.perf_counter,
) -> Comparison:
    """Run every batch on both backends; the first one alternates, so that drift of the machine affects both."""
    results: dict[str, list[ThroughputResult]] = {first.name: [], second.name: []}
    for number, prompts in enumerate(batches):
        for backend in (first, second) if number % 2 == 0 else (second, first):
            results[backend.name].append(measure(backend, prompts, output_len, clock))
    return Comparison((first.name, second.name), (results[first.name], results[second.name]))


def _rates(results: Sequence[ThroughputResult]) -> str:
    return " ".join(f"{result.output_tokens_per_second:.2f}" for result in results)
