# SPDX-License-Identifier: Apache-2.0
"""States of a checkpoint's files, to detect that they changed between reads.

Invariant: torch-free. A state includes the inode and the time of the last status change, so that a replaced file with
the old size and modification time is detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ModelLoadError
from quire.models.checkpoint import resolve_model_dir
from quire.models.checkpoint_files import MODULES, TEMPLATE_FOLDER
from quire.models.gguf.model import is_gguf, part_names
from quire.models.gguf.projector import projector_of

# Path -> size, modification time and status change in ns, inode.
FileStates = dict[str, tuple[int, int, int, int]]
SUFFIXES = frozenset({".json", ".jsonl", ".safetensors", ".gguf", ".jinja", ".model", ".txt"})
MOST_NAMED = 4  # changed files in one message


def states_of(config: EngineConfig) -> FileStates:
    """Return the state of every file that is read for a config's model and tokenizer."""
    part_of = None if config.model_arch is None else config.arch.part_of
    companions = [] if part_of is None else part_of.companion_dirs
    places = {Path(config.model_dir), tokenizer_dir(config), *map(Path, companions)}
    files = [path for place in places for path in _files(place)]
    projector = projector_of(Path(config.model_dir), config.multimodal)
    files += [] if projector is None else [projector]
    return {str(path): state for path in files if (state := _state(path))}


def tokenizer_dir(config: EngineConfig) -> Path:
    """Return the directory (or GGUF file) with the tokenizer.

    Raises:
        ModelLoadError: there is none under the configured name.
    """
    if config.model.tokenizer is None:
        return Path(config.model_dir)
    return resolve_model_dir(config.model.tokenizer, None, config.load.download_dir)


def check_files(config: EngineConfig) -> None:
    """Compare the files of a prepared config, and of its draft model, with their states at preparation.

    Raises:
        ModelLoadError: names the files that were changed, added or removed.
    """
    for one in (config, config.draft):
        if one is None or not one.files:
            continue
        now = states_of(one)
        names = sorted({path for path, _ in one.files.items() ^ now.items()})
        if names:
            raise ModelLoadError(_changed(names))


def _changed(paths: list[str]) -> str:
    named = ", ".join(paths[:MOST_NAMED]) + (
        f" and {len(paths) - MOST_NAMED} more" * (len(paths) > MOST_NAMED)
    )
    return f"files of the model have changed since it was first read: {named}; start the program again to use them"


def _files(place: Path) -> Iterator[Path]:
    if is_gguf(place):
        yield from map(Path, part_names(str(place)))
        return
    modules = place / MODULES
    text = modules.read_text(errors="replace") if modules.is_file() else ""
    for path in place.iterdir() if place.is_dir() else ():
        if path.is_dir():
            if path.name == TEMPLATE_FOLDER or f'"{path.name}"' in text:
                yield from (inner for inner in path.iterdir() if inner.suffix in SUFFIXES)
        elif path.suffix in SUFFIXES:
            yield path


def _state(path: Path) -> tuple[int, int, int, int] | None:
    """Return a file's state; None if it is gone or unreadable, which its reader reports."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
