# SPDX-License-Identifier: Apache-2.0
"""Cost of drafting by `ngram` and `suffix` on the host, for a text of a given length.

    python -m benchmarks.guess_cost [--num-tokens 32768] [--num-asked 300]

Microseconds per request and step: of each drafter over texts of several kinds, the median and the longest; of the whole
choice (both drafters, the best guess, how many) for one request and for sixteen; and of the first question of a request
whose owner is new, while there are many others.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.spec_decode.drafter import Drafter, Text, make_drafters
from quire.spec_decode.speculation import Speculation, Verified

MOST = 8
VOCAB_SIZE = 50_000
OWNER = ("", None)


class Cost(NamedTuple):
    """Microseconds."""

    name: str
    median: float
    longest: float


def texts(num_tokens: int) -> dict[str, list[int]]:
    """Return texts that are easy and hard to look up, by kind."""
    draw = random.Random(0)
    words = [draw.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
    return {
        "no two tokens alike": words,
        "repeats 500 tokens": (words[:500] * (num_tokens // 500 + 1))[:num_tokens],
        "one token": [7] * num_tokens,
        "two tokens": [draw.randrange(2) for _ in range(num_tokens)],
    }


def timed(name: str, calls: Iterator[Callable[[], object]]) -> Cost:
    """Each call once."""
    took = []
    for call in calls:
        started = time.perf_counter()
        call()
        took.append(1e6 * (time.perf_counter() - started))
    return Cost(name, statistics.median(took), max(took))


def growing(drafter: Drafter, ids: list[int], num_asked: int) -> Iterator[Callable[[], object]]:
    """A text whose first half is the prompt, from some tokens before its end on; the first question is not counted."""
    array, prompt = np.array(ids, dtype=np.int32), len(ids) // 2
    drafter.propose([Text("a", array[: len(ids) - num_asked], prompt, OWNER)], MOST)
    for length in range(len(ids) - num_asked + 1, len(ids)):
        text = Text("a", array[:length], prompt, OWNER)
        yield lambda text=text: drafter.propose([text], MOST)  # type: ignore[misc]


def choosing(
    config: EngineConfig, ids: list[int], num_requests: int, num_asked: int
) -> Iterator[Callable[[], object]]:
    """All of it, per step; every guess is taken to be right."""
    speculation, array = Speculation(make_drafters(config)), np.array(ids, dtype=np.int32)
    names = list(map(str, range(num_requests)))
    for name in names:
        speculation.add_request(name, len(ids) // 2, OWNER)
    drafts: dict[str, list[int]] = {}

    def step(known: dict[str, NDArray[np.int32]]) -> None:
        verified = {name: Verified(len(guessed), len(guessed)) for name, guessed in drafts.items()}
        width = num_requests + sum(one.num_drafts for one in verified.values())
        speculation.note_step(verified, num_requests, width, 0.05)
        drafts.clear()
        if not speculation.rests():
            drafts.update(speculation.propose(known))

    for length in range(len(ids) - num_asked, len(ids)):
        known = dict.fromkeys(names, array[:length])
        if length > len(ids) - num_asked + 3:  # the first ones read all of the text
            yield lambda known=known: step(known)  # type: ignore[misc]
        else:
            step(known)


def arriving(drafter: Drafter, num_owners: int, num_asked: int) -> Iterator[Callable[[], object]]:
    """The last of many requests, each of which has an owner of its own and has said a token."""
    said = np.array([1, 2], dtype=np.int32)
    for number in range(num_owners):
        text = Text(str(number), said, 1, ("", str(number)))
        if number >= num_owners - num_asked:
            yield lambda text=text: drafter.propose([text], MOST)  # type: ignore[misc]
        else:
            drafter.propose([text], MOST)
        drafter.forget(str(number))


def measured(num_tokens: int, num_asked: int, num_owners: int) -> Iterator[Cost]:
    """All costs, one after the other."""
    config = EngineConfig.from_args(speculative_config={"method": "auto"})
    kinds = texts(num_tokens)
    for kind, ids in kinds.items():
        for method in make_drafters(config):
            drafter = make_drafters(config)[method]
            yield timed(f"{method}, {kind}", growing(drafter, ids, num_asked))
    for count in (1, 16):
        step = timed(
            f"auto, {count} requests, each", choosing(config, kinds["repeats 500 tokens"], count, num_asked)
        )
        yield step._replace(median=step.median / count, longest=step.longest / count)
    drafter = make_drafters(config)["suffix"]
    yield timed(f"suffix, a new owner beside {num_owners}", arriving(drafter, num_owners, num_asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-tokens", type=int, default=32768)
    parser.add_argument("--num-asked", type=int, default=300)
    parser.add_argument("--num-owners", type=int, default=20_000)
    args = parser.parse_args()
    print(f"{'':40}  median  longest  (microseconds)")
    for name, median, longest in measured(args.num_tokens, args.num_asked, args.num_owners):
        print(f"{name:40}  {median:6.1f}  {longest:7.1f}", flush=True)


if __name__ == "__main__":
    main()
