# SPDX-License-Identifier: Apache-2.0
"""One start, timed by its own process: `python -m quire.bench.startup_process BEGIN < config.json`.

BEGIN is the monotonic time at which the process was requested. Writes phase -> seconds, as JSON. It times the work of
`LLMEngine`, with imports as in a server's core process: a phase ends when a watched function returns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.processes import begin_imports, end_imports
from quire.torch_import import begin_torch


class Stopwatch:
    """Durations of consecutive phases."""

    def __init__(self, begin: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._last = begin
        self._clock = clock
        self.phases: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Record the time since the previous phase as this one."""
        now = self._clock()
        self.phases[phase], self._last = now - self._last, now

    def watch(self, owner: Any, name: str, phase: str, then: Callable[[], None] = lambda: None) -> None:
        """End the phase when this function of a module or class returns."""
        function = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            self.end(phase)
            then()
            return result

        setattr(owner, name, watched)


def time_first_token(stopwatch: Stopwatch, encoded: bytes) -> None:
    """Start an engine and generate one token."""
    stopwatch.end("interpreter")
    begin_imports()
    begin_torch()
    from quire.config import EngineConfig
    from quire.engine import core, front_end, llm_engine
    from quire.sampling_params import SamplingParams

    config = EngineConfig.decoded(encoded)
    stopwatch.end("imports of quire")
    stopwatch.watch(front_end, "load_tokenizer", "tokenizer")
    stopwatch.watch(core, "resolve_executor", "import of torch", lambda: _watch_worker(stopwatch))
    engine = llm_engine.LLMEngine(config)
    stopwatch.end("KV cache")
    engine.add_request("0", [0], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    stopwatch.end("first step")
    engine.shutdown()


def _watch_worker(stopwatch: Stopwatch) -> None:
    end_imports()
    from quire.worker import worker

    stopwatch.watch(worker, "load_model", "weights")
    stopwatch.watch(worker.Worker, "load", "warm-up")


def main() -> int:
    """Time one start and return the exit code."""
    stopwatch = Stopwatch(float(sys.argv[1]))
    try:
        time_first_token(stopwatch, sys.stdin.buffer.read())
    except QuireError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(stopwatch.phases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
