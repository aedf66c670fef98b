# SPDX-License-Identifier: Apache-2.0
"""Cost of sums of fixed slices (`--tp-invariant`): `python -m benchmarks.invariance [--hidden 1024] [--layers 8]`.

A made-up Llama, by engines of one rank and of two, each with and without, in turn. Prints the time of a prompt of 256
tokens and of a step of one token, each the median over rounds, and by how much they are longer with slices.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import made_up

ROUNDS, PROMPT, TOKENS = 9, 256, 32
CASES = [(ranks, invariant) for ranks in (1, 2) for invariant in (False, True)]


def report(found: Mapping[tuple[int, bool], list[tuple[float, float]]]) -> None:
    for ranks in (1, 2):
        for index, what in enumerate((f"a prompt of {PROMPT} tokens", "a step of one token")):
            plain, sliced = (
                1e3 * statistics.median(times[index] for times in found[ranks, invariant])
                for invariant in (False, True)
            )
            print(
                f"{ranks} rank{'s' * (ranks > 1)}: {what} takes {plain:.2f} ms, with slices {sliced:.2f} ms "
                f"({sliced / plain - 1:+.1%})"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024, help="features, a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--quantization", help="as of quire serve")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = made_up.written(
            Path(directory),
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 64,
            vocab_size=4096,
        )
        engines = {
            (ranks, invariant): made_up.started(
                model,
                max_num_batched_tokens=PROMPT,
                enable_prefix_caching=False,
                tensor_parallel_size=ranks,
                tp_invariant=invariant,
                quantization=args.quantization,
            )
            for ranks, invariant in CASES
        }
    found: dict[tuple[int, bool], list[tuple[float, float]]] = {case: [] for case in CASES}
    for number in range(ROUNDS):
        for case, engine in engines.items():
            found[case].append(made_up.timed(engine, f"{number}", list(range(PROMPT)), TOKENS))
    report({case: times[1:] for case, times in found.items()})  # the first round records steps
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
