# SPDX-License-Identifier: Apache-2.0
"""Speedup of speculative decoding at given acceptance rates: the same texts with and without drafts, alternating.

Outputs are generated once, recorded, and drafted from the record (`quire.spec_decode.recorded`).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.bench.backends import Backend, Prompts
from quire.errors import EngineError
from quire.spec_decode.recorded import RecordedOutput, write_recorded

MakeBackend = Callable[[str, float], Backend]
"""Makes an engine that drafts from a file of recorded outputs with an acceptance rate."""


@dataclass(frozen=True)
class Speedup:
    """Output tokens per second, medians over several batches."""

    acceptance_rate: float
    without: float
    with_drafts: float

    @property
    def ratio(self) -> float:
        return self.with_drafts / self.without

    def line(self) -> str:
        """Return the result as text."""
        return (
            f"acceptance {self.acceptance_rate:4.2f}: {self.ratio:5.2f}x "
            f"({self.without:.2f} -> {self.with_drafts:.2f} output tokens/s)"
        )

    def as_json(self) -> dict[str, float]:
        return dataclasses.asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True)
class SpeculationResult:
    """Speedup at each rate."""

    speedups: Sequence[Speedup]

    def lines(self) -> list[str]:
        """Return the results as text."""
        return [speedup.line() for speedup in self.speedups]

    def as_json(self) -> dict[str, object]:
        return {"speedups": [speedup.as_json() for speedup in self.speedups]}


def measure(
    plain: Backend,
    make: MakeBackend,
    batches: Sequence[Prompts],
    output_len: int,
    rates: Sequence[float],
    clock: Callable[[], float] = time.perf_counter,
) -> SpeculationResult:
    """Run every batch on the engine without drafts and on one per rate.

    Raises:
        EngineError: outputs with drafts differ, an internal bug.
    """
    outputs = [plain.generate(prompts, output_len) for prompts in batches]
    recorded = [
        RecordedOutput(prompt, token_ids)
        for prompts, generated in zip(batches, outputs, strict=True)
        for prompt, token_ids in zip(prompts, generated, strict=True)
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "outputs.json"
        write_recorded(path, recorded)
        speedups = []
        for rate in rates:
            drafted = make(str(path), rate)
            for prompts in batches:
                drafted.generate(prompts, 1)  # fills its prefix cache, as that of the engine without drafts
            drafted.generate(batches[0], output_len)
            times = [
                _times(plain, drafted, *case, output_len, clock)
                for case in zip(batches, outputs, strict=True)
            ]
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            speedups.append(Speedup(rate, *(len(batches[0]) * output_len / median for median in medians)))
    return SpeculationResult(speedups)


def _times(
    plain: Backend,
    drafted: Backend,
    prompts: Prompts,
    expected: list[list[int]],
    output_len: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    seconds = []
    for backend in (plain, drafted):
        started = clock()
        generated = backend.generate(prompts, output_len)
        seconds.append(clock() - started)
        if generated != expected:
            raise EngineError("the engine generated different tokens with drafts")
    return seconds[0], seconds[1]
