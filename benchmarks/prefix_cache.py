# SPDX-License-Identifier: Apache-2.0
"""Cost of the prefix cache where it finds nothing, and its gain where requests share a prefix.

    python benchmarks/prefix_cache.py cost [--model quire-demo] [--num-rounds 40] [--max-num-batched-tokens 2048]
    python benchmarks/prefix_cache.py shared [--model quire-demo] [--num-rounds 5] [--max-num-batched-tokens 2048]

Two engines in one process, with and without the cache, get the same batches in turn. `cost`: prompts of which no two
begin alike. `shared`: 32 prompts that begin with the same 1,000 tokens, all at once, with an empty cache. Steps hold as
many tokens as a server's do: requests that start in the first step all compute the prefix.
"""

from __future__ import annotations

import argparse
import statistics

from quire.bench.backends import Prompts, QuireBackend
from quire.bench.throughput import Comparison, compare
from quire.bench.workload import random_prompts
from quire.config import DEMO_MODEL, EngineConfig

NUM_REQUESTS = 32
PREFIX_LEN = 1000
SHARED_SUFFIX_LEN, SHARED_OUTPUT_LEN = 20, 16
COST_INPUT_LEN, COST_OUTPUT_LEN = 128, 64


def make_engine(model: str, max_num_batched_tokens: int, *, cached: bool) -> QuireBackend:
    """With random weights if the model is a config without any."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True} if model != DEMO_MODEL else {}
    config = EngineConfig.from_args(
        model=model,
        enable_prefix_caching=cached,
        max_model_len=2048,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=max_num_batched_tokens,
        **options,
    )
    backend = QuireBackend(config)
    backend.name = "on" if cached else "off"
    return backend


def distinct_prompts(vocab_size: int, seed: int) -> Prompts:
    """No two begin with the same block."""
    return random_prompts(NUM_REQUESTS, COST_INPUT_LEN, range(3, vocab_size), seed)


def sharing_prompts(vocab_size: int, seed: int) -> Prompts:
    """The same beginning, then each its own."""
    (prefix,) = random_prompts(1, PREFIX_LEN, range(3, vocab_size), seed)
    suffixes = random_prompts(NUM_REQUESTS, SHARED_SUFFIX_LEN, range(3, vocab_size), -1 - seed)
    return [prefix + suffix for suffix in suffixes]


def summary(comparison: Comparison) -> str:
    """Describe the ratios of pairs, as disturbances slow both of one, and of the best rounds, as none speeds one up."""
    pairs = list(zip(*comparison.results, strict=True))
    ratios = sorted(on.output_tokens_per_second / off.output_tokens_per_second for on, off in pairs)
    quarter = len(ratios) // 4
    on, off = comparison.medians()
    best_on, best_off = (max(one.output_tokens_per_second for one in many) for many in comparison.results)
    return (
        f"output tokens/s, medians: {on:.1f} with the cache, {off:.1f} without\n"
        f"ratio of pairs: median {statistics.median(ratios):.4f}, quartiles {ratios[quarter]:.4f} and "
        f"{ratios[-1 - quarter]:.4f}, of {len(ratios)} rounds; ratio of the best rounds: {best_on / best_off:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=("cost", "shared"))
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--num-rounds", type=int)
    parser.add_argument(
        "--num-warm-up-rounds",
        type=int,
        default=12,
        help="Until each block was in use once: memory is given on first use, and without the cache fewer are used.",
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    args = parser.parse_args()
    engines = [
        make_engine(args.model, args.max_num_batched_tokens, cached=cached) for cached in (True, False)
    ]
    vocab_size = engines[0].vocab_size
    make, output_len, num_rounds = {
        "cost": (distinct_prompts, COST_OUTPUT_LEN, args.num_rounds or 40),
        "shared": (sharing_prompts, SHARED_OUTPUT_LEN, args.num_rounds or 5),
    }[args.workload]
    batches = [
        make(vocab_size, seed) for seed in range(num_rounds)
    ]  # a seed of its own: nothing of it is cached
    for engine in engines:
        for seed in range(num_rounds, num_rounds + args.num_warm_up_rounds):
            engine.generate(make(vocab_size, seed), output_len)
    comparison = compare(engines[0], engines[1], batches, output_len)
    print(summary(comparison))


if __name__ == "__main__":
    main()
