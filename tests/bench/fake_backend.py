# SPDX-License-Identifier: Apache-2.0
"""A backend that generates nothing and moves a clock by a fixed time."""

from __future__ import annotations

from quire.bench.backends import Prompts


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeBackend:
    vocab_size = 50

    def __init__(
        self, name: str, clock: FakeClock, seconds: list[float], log: list[str] | None = None
    ) -> None:
        self.name, self._clock, self._seconds, self._log = name, clock, seconds, log
        self.batches: list[tuple[Prompts, int]] = []

    def generate(self, prompts: Prompts, output_len: int) -> list[list[int]]:
        self._clock.now_s += self._seconds[len(self.batches) % len(self._seconds)]
        self.batches.append((prompts, output_len))
        if self._log is not None:
            self._log.append(self.name)
        return [[0] * output_len for _ in prompts]
