# SPDX-License-Identifier: Apache-2.0
"""Facts about the served model's files, as Ollama's clients show them."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from quire.errors import ModelLoadError
from quire.model_cache.facts import numbers_by_type
from quire.models.gguf.model import is_gguf
from quire.models.weight_files import weight_files

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # Types of safetensors in which a number is a parameter.
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class FileFacts:
    """Facts about weight files.

    Args:
        size: bytes of all of them.
        digest: SHA-256 of their names, sizes and times, which changes whenever a file does; hashing the weights
            themselves would take minutes.
        modified_at: time of the last change, in Ollama's format; empty without files.
        parameter_size: number of parameters, such as "1.2B"; empty where packed integers hold them.
        main_type: type of most of the numbers.
    """

    size: int
    digest: str
    modified_at: str
    parameter_size: str
    main_type: str
    form: str


@functools.lru_cache(maxsize=4)
def facts_of_files(model_dir: str) -> FileFacts:
    """Return the facts about a model's weight files, read once; of a model without files, zeros."""
    path = Path(model_dir)
    form = "gguf" if is_gguf(path) else "safetensors"
    try:
        files = weight_files(path) if model_dir else []
        counts = numbers_by_type(path) if files else {}
    except ModelLoadError:  # dummy weights need no files
        files, counts = [], {}
    stats = [(file.name, file.stat()) for file in files]
    states = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    newest = max((stat.st_mtime for _, stat in stats), default=None)
    is_counted = form == "gguf" or FLOATS.issuperset(counts)
    return FileFacts(
        size=sum(stat.st_size for _, stat in stats),
        digest=hashlib.sha256(repr([model_dir, *states]).encode()).hexdigest(),
        modified_at="" if newest is None else _written(newest),
        parameter_size=_short(sum(counts.values())) if is_counted and counts else "",
        main_type=max(counts, key=lambda name: counts[name], default=""),
        form=form,
    )


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _short(number: int) -> str:
    """Return a number as Ollama writes it: 1.2B, 361.8M."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
