# SPDX-License-Identifier: Apache-2.0
"""Embeddings beside what people use for them, in turn, of the same random weights and texts.

    python -m benchmarks.embeddings [--shape minilm] [--load texts] [--rounds 5] [--peers transformers]
        [--quantization int8] [--dtype float32]

Prints medians of texts per second (of one text, milliseconds) and quire's ratio to each peer, and how near the vectors
are: the smallest cosine in float32, the rank correlation of similarities where weights are rounded. Peers are
transformers, sentence-transformers and onnxruntime (with onnx), each of which has to be installed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.embeddings.engines import ENGINES, Engine
from benchmarks.embeddings.shapes import LOADS, SHAPES, texts_of, write_model

NUM_COMPARED = 64
ALONE = 30
"""Texts of a round that come one by one, where a load is of one: a server that has work is not cold."""
REST_S = 0.2
"""After an engine's turn, so that no threads of its still wait for more on the processors of the next."""
QUERY = "What money do they use in Japan?"


def seconds(engine: Engine, texts: list[str], *, scores: bool) -> float:
    """Return the seconds of all texts in one call."""
    start = time.perf_counter()
    if scores:
        engine.score(QUERY, texts)
    else:
        engine.embed(texts)
    return time.perf_counter() - start


def latency(engine: Engine, texts: list[str], *, scores: bool) -> float:
    """Median of what each takes alone."""
    return statistics.median(seconds(engine, [text], scores=scores) for text in texts)


def likeness(ours: NDArray[Any], theirs: NDArray[Any]) -> str:
    """Describe the similarity of two sets of vectors [N, H], and of the order of their cosines."""
    cosine = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    above = np.triu_indices(len(ours), 1)
    ranks = [np.argsort(np.argsort((one @ one.T)[above])) for one in (ours, theirs)]
    return f"least cosine {cosine.min():.6f}, rank correlation {np.corrcoef(*ranks)[0, 1]:.5f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--load", choices=LOADS, default="texts")
    parser.add_argument("--num-texts", type=int, help="instead of the load's number")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peers", nargs="*", choices=sorted(ENGINES.keys() - {"quire"}), default=["transformers"]
    )
    parser.add_argument("--dtype", default="float32", help="of quire's weights")
    parser.add_argument(
        "--quantization", choices=("int8", "int4"), help="of quire's, and onnxruntime's, weights"
    )
    args = parser.parse_args()
    shape, load = SHAPES[args.shape], LOADS[args.load]
    load = load._replace(num_texts=args.num_texts or load.num_texts)
    measure, num_drawn = (latency, ALONE) if load.num_texts == 1 else (seconds, load.num_texts)
    scores = shape.class_name.endswith("Classification")
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder))
        options = {"dtype": args.dtype, "quantization": args.quantization}
        engines = {name: ENGINES[name](Path(folder), shape, **options) for name in ("quire", *args.peers)}
    compare(engines, args, texts_of(load, 0), scores=scores)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(args.rounds):
        texts = texts_of(load._replace(num_texts=num_drawn), number + 1)
        for name in sorted(engines, reverse=bool(number % 2)):
            time.sleep(REST_S)
            times[name].append(measure(engines[name], texts, scores=scores))
    report(times, load.num_texts)


def compare(engines: dict[str, Engine], args: argparse.Namespace, texts: list[str], *, scores: bool) -> None:
    """Warm all up, and say how near the results are."""
    first = {
        name: engine.score(QUERY, texts) if scores else engine.embed(texts)
        for name, engine in engines.items()
    }
    for name in args.peers:
        if scores:
            print(f"{name}: scores differ by up to {np.abs(first['quire'] - first[name].ravel()).max():.2g}")
        elif len(texts) > 1:
            print(f"{name}: {likeness(first['quire'][:NUM_COMPARED], first[name][:NUM_COMPARED])}")


def report(times: dict[str, list[float]], num_texts: int) -> None:
    """Medians, and the medians of the rounds' ratios."""
    for name, each in times.items():
        middle = statistics.median(each)
        told = f"{1000 * middle:.2f} ms" if num_texts == 1 else f"{num_texts / middle:.0f} texts/s"
        ratio = statistics.median(theirs / ours for theirs, ours in zip(each, times["quire"], strict=True))
        print(f"{name:24} {told:>16}" + ("" if name == "quire" else f"   quire is {ratio:.2f} times as fast"))


if __name__ == "__main__":
    main()
