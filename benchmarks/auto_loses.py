"""Whether `auto` ever loses: tokens per second with it and without, in turns.

    python -m benchmarks.auto_loses [--quantization int8] [--num-tokens 128] [--num-rounds 5] [--batch-sizes 1 8]

Of the model in the box, whose steps take half a millisecond, on questions that it answers; and of a model of the shape
of `models/dummy-0.5b`, whose random text has nothing to be guessed. Each line has the median of the rounds' ratios, and
the lowest and highest one; the first round is not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from demo_model.cases import cases
from quire import LLM, SamplingParams
from quire.config.model import DEMO_MODEL

SHAPE = Path(__file__).parent / "models" / "dummy-0.5b"
WAYS: tuple[dict[str, Any], ...] = ({}, {"method": "auto"})
Generate = Callable[[LLM, int], int]
"""Engine and round -> tokens that were generated."""


def ratios(engines: list[LLM], generate: Generate, num_rounds: int) -> list[float]:
    """Of each round, tokens per second with guesses over those without."""
    found = []
    for number in range(1 + num_rounds):
        rates = []
        for engine in engines if number % 2 else engines[::-1]:
            started = time.perf_counter()
            tokens = generate(engine, number)
            rates.append(tokens / (time.perf_counter() - started))
        without, with_guesses = rates if number % 2 else rates[::-1]
        found.append(with_guesses / without)
    return found[1:]


def answering(batch_size: int, num_tokens: int) -> Generate:
    """Questions that the model in the box was made for; every round has others."""
    asked = [one.messages for one in cases(11, 0) if not one.tools]
    draw = random.Random(1)
    draw.shuffle(asked)

    def generate(engine: LLM, number: int) -> int:
        first = number * batch_size % (len(asked) - batch_size)
        params = SamplingParams(temperature=0.7, seed=number, max_tokens=num_tokens)
        outputs = engine.chat(asked[first : first + batch_size], params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in outputs)

    return generate


def babbling(batch_size: int, num_tokens: int) -> Generate:
    """Random tokens behind random tokens."""

    def generate(engine: LLM, number: int) -> int:
        draw = random.Random(number)
        prompts = [[draw.randrange(1000, 150_000) for _ in range(64)] for _ in range(batch_size)]
        params = SamplingParams(
            temperature=1.0, seed=number, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in outputs)

    return generate


def measured(args: argparse.Namespace) -> Iterator[str]:
    """Lines for people."""
    dummy = {
        "model": str(SHAPE),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "quantization": args.quantization,
    }
    kinds: tuple[tuple[dict[str, Any], Callable[[int, int], Generate]], ...] = (
        ({"model": DEMO_MODEL}, answering),
        (dummy, babbling),
    )
    for options, made in kinds:
        engines = [LLM(**options, max_num_seqs=16, speculative_config=way) for way in WAYS]
        for batch_size in args.batch_sizes:
            found = ratios(engines, made(batch_size, args.num_tokens), args.num_rounds)
            low, high = min(found), max(found)
            name = Path(str(options["model"])).name
            yield f"{name}, batch {batch_size}: {statistics.median(found):.3f}x ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    for line in measured(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
