"""Reads generation_config.json: a model's default sampling parameters and further end-of-sequence tokens.

Invariant: torch-free; a directory without the file has no defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from quire.models.json_object import JsonObject, optional_json_object

# Sampling default -> (low, high); the names are those of `SamplingParams`.
_SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (math.nextafter(0.0, 1.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.nextafter(0.0, 1.0), 1e6),
}


def read_generation_config(directory: Path) -> dict[str, float]:
    """Default sampling parameters in a directory's generation_config.json; none if there is no such file.

    Raises:
        ModelLoadError: the file is malformed or a value is out of range.
    """
    return sampling_defaults(generation_file(directory))


def sampling_defaults(file: JsonObject) -> dict[str, float]:
    """Those of an object with the keys of generation_config.json; raises as `read_generation_config` does."""
    found = {
        name: file.number(name, low=low, high=high) for name, (low, high) in _SAMPLING.items() if name in file
    }
    return found | ({"top_k": file.integer("top_k", low=-1)} if "top_k" in file else {})


def generation_file(directory: Path) -> JsonObject:
    """The file's object, an empty one if there is no such file; raises as `read_json_object` does."""
    return optional_json_object(directory / "generation_config.json")


def token_ids(file: JsonObject, key: str, vocab_size: int) -> tuple[int, ...]:
    """One id or a list of them; ids outside the vocabulary, which no model can produce, are left out.

    Raises:
        ModelLoadError: the value is something else.
    """
    value = file.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise file.wrong(key, "a token id or a list of token ids")
    return tuple(item for item in ids if item < vocab_size)
