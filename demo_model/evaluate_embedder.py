# SPDX-License-Identifier: Apache-2.0
"""Recall of quire-demo-embed for held-out questions about its facts: `python -m demo_model.evaluate_embedder`.

Exits with 1 below 95 percent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_model.train_embedder import ASSETS, recall
from quire import LLM

GOAL = 0.95
SEED = 11


def by_quire(model: str, **options: Any) -> Callable[[Sequence[str]], Tensor]:
    """Return a function that embeds texts with quire."""
    llm = LLM(model, **options)
    return lambda texts: torch.tensor([one.outputs.embedding for one in llm.embed(list(texts))])


def by_sentence_transformers(model: str) -> Callable[[Sequence[str]], Tensor]:
    """Return a function that embeds texts with the reference implementation."""
    from sentence_transformers import SentenceTransformer

    embedder = SentenceTransformer(model, device="cpu")
    return lambda texts: F.normalize(embedder.encode(list(texts), convert_to_tensor=True).float())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=4, help="questions for each fact")
    parser.add_argument("--backend", choices=("quire", "sentence-transformers"), default="quire")
    args = parser.parse_args()
    make = by_quire if args.backend == "quire" else by_sentence_transformers
    found = recall(make(str(ASSETS)), SEED, times=args.times)
    print(f"nearest fact is the right one: {100 * found:.1f} %")
    return int(found < GOAL)


if __name__ == "__main__":
    sys.exit(main())
