# SPDX-License-Identifier: Apache-2.0
"""Grammar libraries side by side: what compiling costs, and a mask.

    python benchmarks/grammar_libraries.py [--vocab-size 150000] [--num-steps 300]

llguidance is what quire uses; xgrammar is measured if it is installed. The vocabulary is made up: all bytes, and pieces
of words drawn from a seed. A text is a random walk through what a mask allows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SYLLABLES = [a + b for a in "bcdfghklmnprstvw" for b in "aeiou"] + ["ing", "er", "tion", "st", "th", "qu"]
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "any object": {"type": "object"},
    "long text": {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 500}},
        "required": ["a"],
    },
    "date-time": {"type": "array", "items": {"type": "string", "format": "date-time"}},
    "200 properties": {
        "type": "object",
        "properties": {f"prop_{i}": {"type": ["string", "number", "null"]} for i in range(200)},
        "required": [f"prop_{i}" for i in range(200)],
        "additionalProperties": False,
    },
    "enum of 500": {"enum": [f"value {i}" for i in range(500)]},
}


class Library(NamedTuple):
    """Adapter of a library: `compile` makes of a schema a function that starts a text."""

    name: str
    compile: Callable[[str], Callable[[], Walk]]


class Walk(NamedTuple):
    """A text: `fill` writes a mask, `step` goes on with a token, and says whether it may."""

    fill: Callable[[NDArray[np.int32]], None]
    step: Callable[[int], bool]


def vocabulary(size: int) -> list[bytes]:
    draw = random.Random(1)
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(tokens) < size - 1:
        word = "".join(draw.choices(SYLLABLES, k=draw.randint(1, 4)))
        tokens[(draw.choice(["", " ", ' "', '"', "_"]) + draw.choice([word, word.title()])).encode()] = None
    return [*tokens, b"<end>"]


def guidance(tokens: list[bytes]) -> Library:
    import llguidance

    class Wrapper:
        is_tokenizer_wrapper, bos_token_id = True, None
        eos_token_id, special_token_ids = len(tokens) - 1, [len(tokens) - 1]

        def __init__(self) -> None:
            self.tokens = tokens

        def __call__(self, text: bytes | str) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    wrapper: Any = Wrapper()
    tokenizer = llguidance.LLTokenizer(wrapper)

    def start(first: Any) -> Walk:
        matcher = first.deep_copy()
        return Walk(
            lambda row: matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes), matcher.consume_token
        )

    def compile_schema(schema: str) -> Callable[[], Walk]:
        grammar = f'%llguidance {{"no_forcing": true}}\nstart: %json {schema}'
        first = llguidance.LLMatcher(tokenizer, grammar)
        return lambda: start(first)

    return Library("llguidance", compile_schema)


def xgrammar(tokens: list[bytes]) -> Library:
    import torch
    import xgrammar as xgr

    info = xgr.TokenizerInfo(
        tokens, vocab_type=xgr.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[len(tokens) - 1]
    )
    compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def start(compiled: Any) -> Walk:
        matcher = xgr.GrammarMatcher(compiled)

        def fill(row: NDArray[np.int32]) -> None:
            matcher.fill_next_token_bitmask(torch.from_numpy(row).view(1, -1))

        return Walk(fill, matcher.accept_token)

    def compile_schema(schema: str) -> Callable[[], Walk]:
        compiled = compiler.compile_json_schema(schema)
        return lambda: start(compiled)

    return Library("xgrammar", compile_schema)


def walk(started: Walk, vocab_size: int, num_steps: int) -> list[float]:
    """Seconds of each mask of a random text."""
    draw, row, seconds = random.Random(3), np.zeros(-(-vocab_size // 32), dtype=np.int32), []
    for _ in range(num_steps):
        began = time.perf_counter()
        started.fill(row)
        seconds.append(time.perf_counter() - began)
        allowed = np.unpackbits(row.view(np.uint8), count=vocab_size, bitorder="little")[:-1].nonzero()[0]
        if not len(allowed) or not started.step(int(draw.choice(allowed))):
            break
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab-size", type=int, default=150_000)
    parser.add_argument("--num-steps", type=int, default=300)
    args = parser.parse_args()
    tokens = vocabulary(args.vocab_size)
    print("| schema | library | compile, ms | mask, median us | mask, largest us |\n|---|---|---:|---:|---:|")
    makers = [
        make for make in (guidance, xgrammar) if make is guidance or importlib.util.find_spec("xgrammar")
    ]
    for library in [make(tokens) for make in makers]:
        for name, schema in SCHEMAS.items():
            began = time.perf_counter()
            start = library.compile(json.dumps(schema))
            compile_ms = (time.perf_counter() - began) * 1e3
            masks = [seconds * 1e6 for seconds in walk(start(), len(tokens), args.num_steps)]
            print(
                f"| {name} | {library.name} | {compile_ms:.1f} | {statistics.median(masks):.0f} | {max(masks):.0f} |"
            )


if __name__ == "__main__":
    main()
