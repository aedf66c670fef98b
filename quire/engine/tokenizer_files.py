"""The files in which checkpoints keep a tokenizer, and what belongs to it.

Invariant: transformers is imported only for a model without `tokenizer.json`, to convert its tokenizer once.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import tokenizers

from quire.errors import ModelLoadError
from quire.version import install_command

logger = logging.getLogger(__name__)

TOKENIZER_NAME = "tokenizer.json"
DEFAULT_TEMPLATE = "default"


def read_backend(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer itself.

    Raises:
        ModelLoadError: there is none, or its file cannot be read.
    """
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        return _convert_with_transformers(directory)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every defect of the file
        raise ModelLoadError(f"{path} is not a valid tokenizer file: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_settings(directory: Path) -> dict[str, Any]:
    """What tokenizer_config.json says; nothing if there is none.

    Raises:
        ModelLoadError: it cannot be read, or is no JSON object.
    """
    return _read_json(directory / "tokenizer_config.json")


def literal_in(settings: dict[str, Any], key: str) -> str | None:
    """A token that is named there, as it is written."""
    token = settings.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def read_chat_templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Every place in which checkpoints keep templates; a file of its own goes before a setting.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    found = settings.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if not isinstance(found, list):
        found = [{"name": DEFAULT_TEMPLATE, "template": found}]
    named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    files[DEFAULT_TEMPLATE] = directory / "chat_template.jinja"
    named |= {name: _read_text(path) for name, path in files.items() if path.is_file()}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _convert_with_transformers(directory: Path) -> tokenizers.Tokenizer:
    hint = "name another one with --tokenizer, or use --skip-tokenizer-init to work on token ids"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelLoadError(
            f"{directory} has no tokenizer.json, and transformers, which could convert its tokenizer, is not "
            f"installed ({install_command('hf')}); {hint}"
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{directory} has no tokenizer that quire can read ({error}); {hint}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(f"the tokenizer in {directory} has no fast form; {hint}")
    logger.info("converted the tokenizer in %s with transformers: it has no tokenizer.json", directory)
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read as text: {error}") from error
