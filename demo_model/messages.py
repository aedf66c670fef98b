# SPDX-License-Identifier: Apache-2.0
"""Messages, and how people type them."""

from __future__ import annotations

import random
import re
from typing import Any

from demo_model import phrases

Message = dict[str, Any]
FIRST_WORD = re.compile(r"^(What|Which|Who|How|Tell|Is|Can|Give|Name)\b")


def say(role: str, content: str, thought: str = "") -> Message:
    """A message; the assistant's may have a thought before it."""
    return {"role": role, "content": content} | ({"reasoning_content": thought} if thought else {})


def without_thoughts(messages: list[Message]) -> list[Message]:
    return [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]


def roughen(text: str, rng: random.Random, held: bool = False, lower: bool = True) -> str:
    """Type a question as people do: prefixes, politeness, missing marks, lower case, no apostrophes."""
    if rng.random() < 0.25:
        prefix = rng.choice(phrases.HELD_PREFIXES if held else phrases.PREFIXES)
        # Only ordinary question words lose their capital after a comma.
        text = prefix + (FIRST_WORD.sub(lambda m: m[0].lower(), text) if prefix.endswith(", ") else text)
    roll = rng.random()
    if roll < 0.12:
        text = text.rstrip(".?!") + rng.choice(phrases.HELD_SUFFIXES if held else phrases.SUFFIXES)
    elif roll < 0.35:
        text = text.rstrip(".?!")
    if rng.random() < 0.05:
        text = text.replace("'", "")
    return text.lower() if lower and rng.random() < (0.2 if held else 0.35) else text


def with_article(text: str) -> str:
    """ "a owl" becomes "an owl"."""
    return re.sub(r"\b([Aa]) (?=(?:ant|owl)\b)", r"\1n ", text)
