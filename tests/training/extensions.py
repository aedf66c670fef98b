# SPDX-License-Identifier: Apache-2.0
"""An extension class as trainers write them for vLLM."""

from __future__ import annotations

from typing import Any


class Counting:
    """Methods that read and change the worker."""

    worker: Any
    model: Any
    model_runner: Any
    rank: int

    def __init__(self) -> None:
        raise AssertionError("an extension is not constructed by itself")

    def num_parameters(self, times: int = 1) -> int:
        return times * sum(one.numel() for one in self.model.parameters())

    def ranks(self) -> dict[str, Any]:
        return {"rank": self.rank, "is_same": self.model_runner.model is self.worker.model}

    def remember(self, key: str, value: str) -> None:
        self.kept = {key: value}

    def recall(self) -> Any:
        return [self.kept]

    def fail(self) -> None:
        raise RuntimeError("no such thing")

    def _hidden(self) -> None:
        raise AssertionError("not to be called")
