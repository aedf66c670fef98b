# SPDX-License-Identifier: Apache-2.0
"""Speculation against plain decode, in turns: ratios of tokens per second.

    python -m benchmarks.auto_loses [--quantization int8] [--num-tokens 128] [--num-rounds 5] [--batch-sizes 1 8]

Two ways to guess: `auto`; and a drafter all of whose guesses are wrong (`recorded`, at a rate of 0), which is to be
found out. Of the included model, whose steps take half a millisecond, on questions that it answers; and of a model of
the shape of `models/dummy-0.5b`, whose random text has nothing to be guessed. Each cell has the median of the rounds'
ratios, and the lowest and highest one; in the first round, which is not counted, engines learn what pays.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_model.cases import cases
from quire import LLM, RequestOutput, SamplingParams
from quire.config.model import DEMO_MODEL
from quire.processes import freeze_garbage
from quire.spec_decode.recorded import RecordedOutput, write_recorded

SHAPE = Path(__file__).parent / "models" / "dummy-0.5b"
PLAIN, AUTO, WRONG = "plain", "auto", "all wrong"
Generate = Callable[[LLM, int], Sequence[RequestOutput]]
"""Engine and round -> what it said, which is the same for all."""


def num_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Return the number of generated tokens."""
    return sum(len(one.outputs[0].token_ids) for one in outputs)


def ratios(engines: Mapping[str, LLM], generate: Generate, num_rounds: int) -> dict[str, list[float]]:
    """Return each engine's tokens per second over the first engine's, per round after the first; engines take turns."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    names, rates = list(engines), dict[str, float]()
    for number in range(1 + num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            outputs = generate(engines[name], number)
            rates[name] = num_tokens(outputs) / (time.perf_counter() - started)
        for name in names:
            found[name].append(rates[name] / rates[names[0]])
    return {name: found[name][1:] for name in names[1:]}


def cell(found: Sequence[float]) -> str:
    """The median, and from where to where."""
    return f"{statistics.median(found):.3f}x ({min(found):.3f} to {max(found):.3f})"


def answering(batch_size: int, num_tokens: int) -> Generate:
    """Questions that the included model was made for; every round has others."""
    asked = [one.messages for one in cases(11, 0) if not one.tools]
    draw = random.Random(1)
    draw.shuffle(asked)

    def generate(engine: LLM, number: int) -> Sequence[RequestOutput]:
        first = number * batch_size % (len(asked) - batch_size)
        params = SamplingParams(temperature=0.7, seed=number, max_tokens=num_tokens)
        return engine.chat(asked[first : first + batch_size], params, use_tqdm=False)

    return generate


def babbling(batch_size: int, num_tokens: int) -> Generate:
    """Random tokens behind random tokens."""

    def generate(engine: LLM, number: int) -> Sequence[RequestOutput]:
        draw = random.Random(number)
        prompts = [[draw.randrange(1000, 150_000) for _ in range(64)] for _ in range(batch_size)]
        params = SamplingParams(
            temperature=1.0, seed=number, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        return engine.generate(prompts, params, use_tqdm=False)

    return generate


def recorded(engine: LLM, generate: Generate, num_rounds: int, path: Path) -> None:
    """Write down what is said in all rounds, for the drafter that is to miss it."""
    said = [one for number in range(1 + num_rounds) for one in generate(engine, number)]
    write_recorded(
        path,
        [RecordedOutput(list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)) for one in said],
    )


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
        # What is said first to write it down must not be found in a cache afterwards.
        options |= {"max_num_seqs": 16, "enable_prefix_caching": False}
        plain, auto = (LLM(**options, speculative_config=way) for way in ({}, {"method": "auto"}))
        for batch_size in args.batch_sizes:
            generate = made(batch_size, args.num_tokens)
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "said.json"
                recorded(plain, generate, args.num_rounds, path)
                guesses = {"method": "recorded", "model": str(path), "synthetic_acceptance_rate": 0.0}
                wrong = LLM(**options, speculative_config=guesses)
            freeze_garbage()  # as a server does once it is ready
            found = ratios({PLAIN: plain, AUTO: auto, WRONG: wrong}, generate, args.num_rounds)
            name = f"{Path(str(options['model'])).name}, batch {batch_size}"
            yield "  ".join([f"{name:24}", *(f"{cell(found[way]):26}" for way in (AUTO, WRONG))]).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--num-rounds", type=int, default=6)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    print("  ".join([" " * 24, f"{AUTO:26}", WRONG]))
    for line in measured(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
