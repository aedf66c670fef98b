# SPDX-License-Identifier: Apache-2.0
"""Cost of parsing an answer: microseconds per token, for every tool format and kind of text.

    python benchmarks/formats.py [--num-chars 100000] [--format NAME] [--json FILE]

Each text comes in pieces of four characters, as tokens do on average. `growth` is the time of twice the text by the
time of the text: 2 is linear. Times are of this thread and the least of three, so neighbors matter little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.formats.reasoning import FORMATS as REASONING_FORMATS
from quire.entrypoints.chat.formats.selection import AnswerFormat
from quire.entrypoints.chat.formats.tools import FORMATS

TOKEN_CHARS = 4
PROSE = "The quick brown fox jumps over the lazy dog, and then it rests. "
CODE = 'def f(x: list[int]) -> dict[str, int]:\n    return {"a": x[0] < 2, "b": [1, 2]}  # <b>\n\n'
TOOLS = {"write": {"type": "object", "properties": {"text": {"type": "string"}}}}
KINDS = (
    "prose", "code", "argument", "code in an argument", "reasoning", "many arguments", "many calls", "openings",
    "beginnings of markers", "white space",
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Parsing cost of one format and kind of text."""

    format: str
    kind: str
    us_per_token: float
    growth: float

    def line(self) -> str:
        return f"{self.format:>18}  {self.kind:<20} {self.us_per_token:8.2f} {self.growth:8.2f}"


def filled(words: str, num_chars: int) -> str:
    return (words * (num_chars // len(words) + 1))[:num_chars]


def answer(kind: str, tools: ToolFormat, reasoning: ReasoningFormat, num_chars: int) -> str:
    """An answer of a kind, about so long."""
    if kind == "prose":
        return filled(PROSE, num_chars)
    if kind == "code":
        return filled(CODE, num_chars)
    if kind == "white space":
        return filled(" \n", num_chars)
    if kind == "openings":
        return filled(tools.write([("write", {})]).partition("write")[0] or "[{", num_chars)
    if kind == "beginnings of markers":
        return filled("".join(marker[:-1] for marker in (tools.opening, *reasoning.opens)) + "<", num_chars)
    if kind == "many arguments":
        return tools.write([("write", {f"a{index}": "x" for index in range(num_chars // 30)})])
    if kind == "many calls":
        return tools.write([("write", {})] * (num_chars // 30))
    if kind == "reasoning":
        return "".join([*reasoning.opens[:1], filled(PROSE, num_chars), *reasoning.closes[:1]])
    return tools.write([("write", {"text": filled(PROSE if kind == "argument" else CODE, num_chars)})])


def seconds(formats: AnswerFormat, pieces: Sequence[str], prompt: str) -> float:
    """The least of three, to read one answer."""
    times = []
    for _ in range(3):
        reader = formats.reader(prompt, TOOLS)
        begin = time.thread_time()
        for piece in pieces:
            reader.feed(piece)
        reader.finish()
        times.append(time.thread_time() - begin)
    return min(times)


def cost(tools: ToolFormat, reasoning: ReasoningFormat, kind: str, num_chars: int) -> Cost:
    formats = AnswerFormat(tools, reasoning)
    prompt = "".join(reasoning.closes[:1])  # it does not begin in the reasoning
    took, num_tokens = [], 0
    for size in (num_chars, 2 * num_chars):
        pieces = tokens(answer(kind, tools, reasoning, size))
        num_tokens = num_tokens or len(pieces)
        took.append(seconds(formats, pieces, prompt))
    return Cost(tools.name, kind, 1e6 * took[0] / num_tokens, took[1] / took[0])


def tokens(text: str) -> list[str]:
    return [text[at : at + TOKEN_CHARS] for at in range(0, len(text), TOKEN_CHARS)]


def reasoning_of(tools: ToolFormat, table: Mapping[str, ReasoningFormat]) -> ReasoningFormat:
    """The reasoning of the same family, if it has one."""
    names = (tools.name, *tools.aliases, "think")
    return next(table[name] for name in names if name in table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-chars", type=int, default=100_000)
    parser.add_argument("--format", help="One tool format; default: all.")
    parser.add_argument("--json", type=Path, help="Write the results to this file.")
    args = parser.parse_args()
    table = {name: row for row in REASONING_FORMATS for name in (row.name, *row.aliases)}
    table["openai"] = table["openai_gptoss"]
    rows = [row for row in FORMATS if args.format in (None, row.name)]
    costs = []
    print(f"{'format':>18}  {'kind':<20} {'us/token':>8} {'growth':>8}")
    for row, kind in itertools.product(rows, KINDS):
        costs.append(cost(row, reasoning_of(row, table), kind, args.num_chars))
        print(costs[-1].line(), flush=True)
    worst = max(costs, key=lambda one: one.us_per_token)
    print(f"worst: {worst.us_per_token:.2f} us per token ({worst.format}, {worst.kind})")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) for one in costs], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
