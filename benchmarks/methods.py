# SPDX-License-Identifier: Apache-2.0
"""Logit error of each method of `quire quantize`, on random weights in the shape of half a billion parameters.

    python -m benchmarks.methods [--shape dummy-0.5b] [--group-size 64] [--calibration-sequences 4] [--folder DIR]

Prints rows for docs/quantization.md: the relative error of the logits and the mean distance of logprobs, as
`benchmarks/accuracy.py` measures them, of 4 bits, with the seconds that writing took. The random checkpoint is written
first, to DIR if it is to be kept. Nothing can be said of perplexity where all tokens are about equally likely.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.accuracy import Accuracy, measure, quantized
from benchmarks.compare.checkpoint import DENSE, ensure
from quire.quantize.grid import IntegerGrid
from quire.quantize.recipe import METHODS


def rows(results: Sequence[Accuracy], seconds: Sequence[float]) -> list[str]:
    """For a table of the docs."""
    return [
        f"| `{result.mode}` | {result.relative_error:.2e} | {result.mean_logprob_distance:.3f} | {took:.0f} s |"
        for result, took in zip(results, seconds, strict=True)
    ]


def compared(
    model: Path,
    methods: Sequence[str],
    grid: IntegerGrid,
    calibration: int,
    text: tuple[int, int],
    written: Path,
) -> list[str]:
    """Each method's row; `text` has the number of sequences that logits are held to, and their length."""
    seconds, directories = [], []
    for method in methods:
        start = time.perf_counter()
        directories += quantized(str(model), [method], grid, calibration, written)
        seconds.append(time.perf_counter() - start)
    return rows(measure(str(model), [], *text, directories), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default=DENSE, help="a directory of benchmarks/models")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--calibration-sequences", type=int, default=4, help="of 512 tokens")
    parser.add_argument("--num-sequences", type=int, default=2)
    parser.add_argument("--num-tokens", type=int, default=32, help="of each sequence")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is written to and kept")
    args = parser.parse_args()
    with TemporaryDirectory() as directory:
        model = ensure(args.folder or Path(directory) / "model", args.shape)
        grid, text = IntegerGrid(args.bits, args.group_size), (args.num_sequences, args.num_tokens)
        lines = compared(model, args.methods, grid, args.calibration_sequences, text, Path(directory))
    print(
        f"| {args.bits} bits, groups of {args.group_size} | relative error | distance of logprobs | written in |"
    )
    print("|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
