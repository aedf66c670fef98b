# SPDX-License-Identifier: Apache-2.0
"""Answer the rows of a table on a Ray cluster, as `ray.data.llm` does with vLLM.

    python examples/ray_data.py in.parquet out-folder --prompt "What is the capital of {country}?"

Ray Data streams blocks of rows to actors, each of which holds one engine, and writes the rows with an answer. Memory is
bounded by the blocks in flight. Needs `ray[data]` and pyarrow. The answers are those of one engine: they depend neither
on the number of actors nor on the block that a row is in.
"""

import argparse
import os
from typing import Any

import numpy as np
import ray
import ray.data

from quire import LLM, SamplingParams


class Answerer:
    """Actor with a model: adds a column with answers to a batch of rows, given as columns."""

    def __init__(self, model: str, prompt: str, max_tokens: int, engine_args: dict[str, Any]) -> None:
        self._llm = LLM(model, **engine_args)
        self._prompt = prompt
        self._params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        chats = [[{"role": "user", "content": self._prompt.format(**row)}] for row in rows]
        answers = [""] * len(rows)
        for index, output in self._llm.chat_iter(chats, self._params):
            answers[index] = output.outputs[0].text
        return {**batch, "answer": np.array(answers, dtype=object)}


def place(path: str) -> str:
    """Return a path that means the same on every host: an address, or absolute on a file system that they share."""
    return path if "://" in path else os.path.abspath(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer the rows of a Parquet table on a Ray cluster.")
    parser.add_argument("source", help="Parquet file or folder; also s3:// and the like")
    parser.add_argument("output", help="folder for Parquet files")
    parser.add_argument("--prompt", required=True, help="with columns as {column}")
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--actors", type=int, default=1, help="engines, each on CPUs or a GPU of its own")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of an actor")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of an actor")
    parser.add_argument("--batch-size", type=int, default=64, help="rows that an actor gets at a time")
    options = parser.parse_args()

    rows = ray.data.read_parquet(place(options.source))
    answered = rows.map_batches(
        Answerer,
        fn_constructor_args=(
            options.model,
            options.prompt,
            options.max_tokens,
            {"cpu_threads": options.cpus},
        ),
        batch_size=options.batch_size,
        num_cpus=options.cpus,
        num_gpus=options.gpus,
        compute=ray.data.ActorPoolStrategy(size=options.actors),
    )
    answered.write_parquet(place(options.output))
    print(f"The rows with their answers are in {options.output}.")


if __name__ == "__main__":
    main()
