# SPDX-License-Identifier: Apache-2.0
"""Show quire-demo-vision pictures that it never saw, and count right answers: `python -m demo_model.evaluate_seeing`.

Greedy answers of `LLM.chat`; an answer is right if it is the expected one, letter by letter. Words in the pictures are
none of training's, and the last row has phrasings that are none of training's either. Exits with 1 below the goal.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from PIL import Image

from demo_model.pictures import HELD_PHRASINGS, Example, examples
from demo_model.train_seeing import ASSETS
from quire import LLM, SamplingParams

SEED, GOAL = 11, 0.75
OVERALL, UNSEEN = "overall", "unseen phrasings"
Table = dict[str, tuple[int, int]]


def asked(image: Image.Image, text: str) -> list[dict[str, Any]]:
    """Return a conversation that shows a picture and asks about it."""
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def answers(llm: LLM, found: Sequence[Example]) -> list[str]:
    """Return greedy answers."""
    chats = [asked(image, question.text) for image, question in found]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=48), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def report(found: Iterable[Example], replies: Iterable[str]) -> Table:
    """Return the questions and the right answers of each kind, the numbers of all kinds last."""
    pairs = [(question, text == question.answer) for (_, question), text in zip(found, replies, strict=True)]
    counts, right = (
        Counter(one.kind for one, _ in pairs),
        Counter(one.kind for one, is_right in pairs if is_right),
    )
    table = {kind: (counts[kind], right[kind]) for kind in HELD_PHRASINGS if counts[kind]}
    return {**table, OVERALL: (len(pairs), right.total())}


def show(table: Table) -> None:
    print("| questions | asked | right | percent |\n|---|---|---|---|")
    for name, (count, right) in table.items():
        print(f"| {name} | {count} | {right} | {100 * right / count:.1f} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ASSETS))
    parser.add_argument("--pictures", type=int, default=1000, help="pictures, each with one question")
    parser.add_argument("--wrong", type=int, default=0, help="print so many wrong answers")
    args = parser.parse_args()
    llm = LLM(args.model)
    found = list(examples(SEED, args.pictures))
    replies = answers(llm, found)
    unseen = list(examples(SEED + 1, args.pictures // 2, held_phrasings=True))
    table = report(found, replies)
    right = table[OVERALL][1] / table[OVERALL][0]
    unseen_replies = answers(llm, unseen)
    show({**table, UNSEEN: report(unseen, unseen_replies)[OVERALL]})
    pairs = zip(chain(found, unseen), chain(replies, unseen_replies), strict=True)
    for question, text in [(one, text) for (_, one), text in pairs if text != one.answer][: args.wrong]:
        print(f"{question.text!r}: wanted {question.answer!r}, got {text!r}")
    return int(right < GOAL)


if __name__ == "__main__":
    sys.exit(main())
