# SPDX-License-Identifier: Apache-2.0
"""Requests that come while others generate: what tapes bring where half of the steps have a prompt in them.

    python -m benchmarks.arrivals [MODEL] [--quantization int8] [--num-requests 64] [--rounds 3]

An engine, and one with --enforce-eager, take turns in one process; 16 requests run at any time, with prompts of 8 to 32
tokens and answers of 8 to 40. Weights are random. Prints medians of tokens per second, and of the 99th percentile of
the times between two tokens of a request.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from quire import SamplingParams
from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.processes import freeze_garbage

MODEL = Path(__file__).parent / "models" / "dummy-0.5b"
RUNNING = 16
VOCABULARY = range(1000, 150_000)
_names = map(str, count())


def asked(seed: int, num_requests: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts and how much is to be said, the same for each engine."""
    draw = random.Random(seed)
    for _ in range(num_requests):
        prompt = draw.choices(VOCABULARY, k=draw.randrange(8, 33))
        yield (
            prompt,
            SamplingParams(
                temperature=0.0, max_tokens=draw.randrange(8, 41), ignore_eos=True, detokenize=False
            ),
        )


def run(engine: LLMEngine, seed: int, num_requests: int) -> tuple[float, float]:
    """Tokens per second, and the 99th percentile of seconds between two tokens of a request."""
    waiting, last, gaps = asked(seed, num_requests), dict[str, float](), list[float]()
    num_tokens, started = 0, time.perf_counter()
    for _ in range(RUNNING):
        _add(engine, waiting)
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.perf_counter()
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now
            if output.finished:
                num_tokens += len(output.outputs[0].token_ids)
                _add(engine, waiting)
    return num_tokens / (time.perf_counter() - started), statistics.quantiles(gaps, n=100)[-1]


def _add(engine: LLMEngine, waiting: Iterator[tuple[list[int], SamplingParams]]) -> None:
    """The next request, if there is one."""
    for prompt, params in waiting:
        engine.add_request(next(_names), {"prompt_token_ids": prompt}, params)
        return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--quantization")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    options |= {"max_model_len": 256, "max_num_seqs": RUNNING, "max_num_batched_tokens": 512}
    options |= {"num_scheduler_steps": 1}  # a step is what is timed
    if args.quantization:
        options["quantization"] = args.quantization
    engines = {
        name: LLMEngine(EngineConfig.from_args(model=str(args.model), enforce_eager=eager, **options))
        for name, eager in (("from tapes", False), ("kernel by kernel", True))
    }
    freeze_garbage()  # as a server does once it is ready
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for seed in range(1 + args.rounds):
        for name, engine in engines.items():
            got = run(engine, seed, args.num_requests)
            if seed:  # the first round records
                found[name].append(got)
    for name, results in found.items():
        rates, gaps = zip(*results, strict=True)
        print(
            f"{name:17} {statistics.median(rates):7.1f} tokens/s, "
            f"99 % of the times between two tokens below {statistics.median(gaps) * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
