# SPDX-License-Identifier: Apache-2.0
"""Common parts of all engines' workers: command line, prompts, clock and the lines that they print.

Invariant: an engine is only asked to continue prompts by a number of tokens, so that all are timed in the same way.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.compare.cases import CASES, Case, Phase, cases_named

MARK = "RATE "
_ORDINARY_IDS = (3, 200)
"""Token ids that are in every vocabulary and mean nothing special in ours."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[int]]
"""Continues every prompt by exactly so many tokens, greedily and past any end of text; returns how many each got."""


def run(load: Callable[[Path, str], Generate], arguments: Sequence[str] | None = None) -> None:
    """Measure the cases named on the command line and print a line for each as soon as it is known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("precision")
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    generate = load(args.model, args.precision)
    generator = random.Random(args.seed)
    cases = list(cases_named(args.cases))
    for case in cases:  # as llama.cpp's tools do: memory is first touched before it counts
        generate(_prompts(generator, case.num_requests, case.input_len), 2)
    for case in cases:
        rate = tokens_per_second(case, generate, generator)
        print(f"{MARK}{json.dumps({'case': case.name, 'rate': rate})}", flush=True)


def tokens_per_second(
    case: Case, generate: Generate, generator: random.Random, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The rate of one case, measured once."""

    def seconds(output_len: int) -> float:
        prompts = _prompts(generator, case.num_requests, case.input_len)
        started = clock()
        generated = generate(prompts, output_len)
        elapsed = clock() - started
        if generated != [output_len] * case.num_requests:
            raise RuntimeError(f"{case.name}: asked for {output_len} tokens, got {generated}")
        return elapsed

    first_tokens = seconds(1) if case.phase is Phase.DECODE else 0.0
    return case.num_tokens / (seconds(case.output_len) - first_tokens)


def _prompts(generator: random.Random, num_prompts: int, num_tokens: int) -> Prompts:
    return [generator.choices(range(*_ORDINARY_IDS), k=num_tokens) for _ in range(num_prompts)]
