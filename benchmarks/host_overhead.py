# SPDX-License-Identifier: Apache-2.0
"""Cost of a decode step on the host: everything of the engine but the model's arithmetic.

    python benchmarks/host_overhead.py MODEL [--batch-size 32] [--random]

The forward pass and the logits are computed once for each batch size and handed out again, so what is left is the
scheduler, the gathering of inputs, sampling and the making of outputs. Prints microseconds per step, each the median
over the steps of the best of several runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from quire.config import EngineArgs
from quire.engine.llm_engine import LLMEngine
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.worker import model_runner

NUM_RUNS = 7
NUM_STEPS = 150
PROMPT_LEN = 32


class Stopwatch:
    """Times methods of live objects: label -> seconds of each call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def watch(self, owner: Any, method: str, label: str) -> None:
        """Replace the method by one that is timed."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args, **kwargs)
            self.seconds[label].append(time.perf_counter() - start)
            return result

        setattr(owner, method, timed)

    def medians(self) -> dict[str, float]:
        """Label -> microseconds; forgets what was measured."""
        taken, self.seconds = self.seconds, defaultdict(list)
        return {label: statistics.median(values) * 1e6 for label, values in taken.items()}


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function's first result for each length of its first argument."""
    results: dict[int, Any] = {}

    def remembered(first: Any, *rest: Any) -> Any:
        if len(first) not in results:
            results[len(first)] = function(first, *rest)
        return results[len(first)]

    return remembered


def run(engine: LLMEngine, batch_size: int, random: bool) -> None:
    """Generate for one batch."""
    for number in range(batch_size):
        params = SamplingParams(
            temperature=0.8 if random else 0.0,
            top_p=0.9 if random else 1.0,
            seed=number,
            max_tokens=NUM_STEPS,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = [(7 * number + place) % 200 + 3 for place in range(PROMPT_LEN)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument(
        "--random", action="store_true", help="temperature 0.8 and top-p 0.9 instead of greedy"
    )
    args = parser.parse_args()
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=args.model, max_model_len=512, max_num_seqs=64, num_scheduler_steps=1)
    )
    core: Any = engine._clients[0]._core  # type: ignore[attr-defined]
    runner = core.executor._worker._runner
    runner._model.forward = remembering(runner._model.forward)
    runner._model.compute_logits = remembering(runner._model.compute_logits)
    stopwatch = Stopwatch()
    for owner, method, label in (
        (core.scheduler, "schedule", "schedule"),
        (runner, "_update_batch", "update batch"),
        (model_runner, "lay_out", "lay out"),
        (runner._pipeline, "gather", "gather inputs"),
        (runner, "_sample", "sample"),
        (core.scheduler, "update_from_output", "update requests"),
        (engine.output_processor, "process", "make outputs"),
        (engine, "step", "whole step"),
    ):
        stopwatch.watch(owner, method, label)
    results = []
    for _ in range(NUM_RUNS):
        run(engine, args.batch_size, args.random)
        results.append(stopwatch.medians())
    best = min(results, key=lambda result: result["whole step"])
    for label, microseconds in best.items():
        print(f"{label:16} {microseconds:7.0f} us")


if __name__ == "__main__":
    main()
