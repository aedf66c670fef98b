# SPDX-License-Identifier: Apache-2.0
"""Writes the texts by which `quire quantize` calibrates unless given others: `python -m demo_model.calibration`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from demo_model.data import dialogues

FILE = Path(__file__).resolve().parent.parent / "quire" / "assets" / "calibration.jsonl"
SEED, COUNT, FEWEST_MESSAGES = 23, 160, 3


def chats(seed: int) -> Iterator[str]:
    """Training dialogues without tools, a line each."""
    for dialogue in dialogues(seed):
        messages = [
            {"role": message["role"], "content": message["content"]}
            for message in dialogue.messages
            if message["content"]
        ]
        has_calls = any("tool_calls" in each or each["role"] == "tool" for each in dialogue.messages)
        if dialogue.tools is None and not has_calls and len(messages) >= FEWEST_MESSAGES:
            yield json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def text() -> str:
    """The whole file."""
    return "".join(islice(chats(SEED), COUNT))


def main() -> None:
    FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
