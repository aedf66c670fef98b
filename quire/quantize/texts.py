# SPDX-License-Identifier: Apache-2.0
"""Calibration texts as sequences of token ids.

A file is plain text, split into sequences. If its name ends in .jsonl, each line is a sequence: {"messages": [...]},
rendered by the model's chat template (or joined by newlines without one), or {"text": ...}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.config import ASSETS
from quire.engine.tokenizer import Tokenizer
from quire.entrypoints.chat.template import ChatTemplate
from quire.errors import ConfigError

CHATS = ASSETS / "calibration.jsonl"
"""Chats of the kind that the bundled models were trained on."""
GENERAL = ASSETS / "calibration.txt"
"""Prose, dialogue, code, tables and a few languages: about 2,500 tokens, for any other model."""


def read_sequences(path: Path, tokenizer: Tokenizer, count: int, length: int) -> list[Sequence[int]]:
    """Return the first `count` sequences of at most `length` tokens each.

    Raises:
        ConfigError: the file cannot be read, holds something else, or nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {path} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        template = None if tokenizer.chat_template is None else ChatTemplate.from_tokenizer(tokenizer)
        found = [
            tokenizer.encode(each, add_special_tokens=False)[:length] for each in _lines(path, text, template)
        ]
    else:
        ids = tokenizer.encode(text, allow_special=False)
        found = [ids[start : start + length] for start in range(0, len(ids), length)]
    sequences: list[Sequence[int]] = [each for each in found[:count] if each]
    if not sequences:
        raise ConfigError(f"--calibration {path} holds no text")
    return sequences


def _lines(path: Path, text: str, template: ChatTemplate | None) -> Iterator[str]:
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--calibration {path}: entry {number} is no JSON: {error}") from error
        said = _said(value, template)
        if said is None:
            raise ConfigError(f'--calibration {path}: entry {number} has neither "messages" nor "text"')
        yield said


def _said(value: Any, template: ChatTemplate | None) -> str | None:
    if not isinstance(value, dict):
        return None
    text, messages = value.get("text"), value.get("messages")
    if isinstance(text, str):
        return text
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("content"), str) for each in messages
    ):
        return None
    if template is None:
        return "\n".join(each["content"] for each in messages)
    return template.render(messages, add_generation_prompt=False)
