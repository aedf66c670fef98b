"""Where an adapter's files are, and which of them are read.

Invariant: torch-free.
"""

from __future__ import annotations

import os
from pathlib import Path

import quire
from quire.models.fingerprint import files_fingerprint

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
TEMPLATES_NAME = "additional_chat_templates"
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    TEMPLATES_NAME,
)
"""Of a tokenizer and of chat templates, which an adapter may have of its own."""
IN_THE_BOX = ("quire-demo-pirate", "quire-demo-json")
"""Adapters of the model in the box that come with quire."""


def directory_of(path: str) -> Path:
    """Where an adapter is: a directory, or the name of one in the box."""
    directory = Path(os.path.expanduser(path))  # which leaves alone what is no user's home
    if path in IN_THE_BOX and not directory.exists():
        return Path(quire.__path__[0]) / "assets" / path
    return directory


def adapter_fingerprint(directory: Path) -> str:
    """Return a digest of the adapter's files, by which one that is read again is known to be the same; empty: none."""
    paths = (directory / name for name in (CONFIG_NAME, WEIGHTS_NAME, *TEXT_FILES))
    files = [path for path in paths if path.is_file()]
    return files_fingerprint(files).hex() if files else ""
