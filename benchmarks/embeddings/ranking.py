# SPDX-License-Identifier: Apache-2.0
"""Effect of an embedder's quantized weights on the order in which it finds documents.

    python -m benchmarks.embeddings.ranking [--model quire-demo-embed] [--quantization int8 int4] [--num-texts 400]

Each query orders all documents by cosine, in float32 and with rounded weights; told are Spearman's rank correlation of
the two orders (mean and least over the queries), how often the first document is the same, and which share of the first
ten is. Queries and documents of the model in the box are its world's: held-out questions and facts. Those of a shape of
`shapes.py` (random weights, whose vectors lie so close together that small differences decide) are random texts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.embeddings.shapes import LOADS, SHAPES, texts_of, write_model

FIRST = 10
BUNDLED_MODEL = "quire-demo-embed"


class Likeness(NamedTuple):
    """Similarity of all queries' document orders to those of the exact model."""

    mean: float
    least: float
    same_first: float
    same_of_ten: float


def likeness(exact: NDArray[Any], rounded: NDArray[Any]) -> Likeness:
    """Compare the orders of two tables of similarities [queries, documents]."""
    correlations = [spearman(*rows) for rows in zip(exact, rounded, strict=True)]
    firsts = [np.argsort(-one, axis=1)[:, :FIRST] for one in (exact, rounded)]
    shared = [len({*one} & {*other}) for one, other in zip(*firsts, strict=True)]
    same = (firsts[0][:, 0] == firsts[1][:, 0]).mean()
    return Likeness(
        float(np.mean(correlations)), min(correlations), float(same), float(np.mean(shared)) / FIRST
    )


def spearman(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The rank correlation of two lists of numbers, of which no two are equal (Spearman, 1904)."""
    ranks = [np.argsort(np.argsort(numbers)) for numbers in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def similarities(
    model: str, queries: Sequence[str], documents: Sequence[str], **options: Any
) -> NDArray[Any]:
    """Cosines [queries, documents] of unit vectors."""
    from quire import LLM

    llm = LLM(model, enable_prefix_caching=False, **options)
    outputs = llm.embed([*queries, *documents], use_tqdm=False)
    vectors = np.array([one.outputs.embedding for one in outputs])
    llm.shutdown()
    found: NDArray[Any] = vectors[: len(queries)] @ vectors[len(queries) :].T
    return found


def made_set(model: str, num_texts: int) -> tuple[list[str], list[str]]:
    """Queries and documents."""
    if model != BUNDLED_MODEL:
        load = LOADS["texts"]._replace(num_texts=num_texts)
        return texts_of(load._replace(num_texts=num_texts // 4), 1), texts_of(load, 2)
    from demo_model.train_embedder import all_facts, question, sentence

    draw = random.Random(1)
    return [question(draw, fact, held=True) for fact in all_facts()], [sentence(fact) for fact in all_facts()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    embedders = [name for name, shape in SHAPES.items() if not shape.class_name.endswith("Classification")]
    parser.add_argument("--model", choices=(BUNDLED_MODEL, *embedders), default=BUNDLED_MODEL)
    parser.add_argument("--quantization", nargs="+", default=["int8", "int4"])
    parser.add_argument(
        "--num-texts", type=int, default=400, help="random documents; a fourth of it, queries"
    )
    args = parser.parse_args()
    queries, documents = made_set(args.model, args.num_texts)
    print(f"{args.model}: {len(queries)} queries, {len(documents)} documents")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model != BUNDLED_MODEL:
            write_model(SHAPES[model], Path(folder))
            model = folder
        exact = similarities(model, queries, documents, dtype="float32")
        for quantization in args.quantization:
            found = likeness(exact, similarities(model, queries, documents, quantization=quantization))
            print(
                f"{quantization:8} Spearman {found.mean:.5f} (least {found.least:.5f})   same first "
                f"{100 * found.same_first:.1f} %   same of ten {100 * found.same_of_ten:.1f} %"
            )


if __name__ == "__main__":
    main()
