# SPDX-License-Identifier: Apache-2.0
"""Additions of the tiny models' adapters besides weights: tokens and tokenizer settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fixtures.tiny_models import write_tiny_tokenizer

FIRST_FREE = 259
"""The first id that no token of the tiny models has."""


def added(token_id: int, content: str, *, special: bool = True) -> dict[str, Any]:
    """An added token as tokenizer.json has it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **flags}


def write_own_tokenizer(directory: Path, change: Callable[[dict[str, Any]], Any], **settings: Any) -> Path:
    """The tokenizer of the tiny models, with its tokenizer.json changed, and these settings and no others."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
