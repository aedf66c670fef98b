# SPDX-License-Identifier: Apache-2.0
"""Download of a model in a process of its own: `python -m quire.model_cache.fetch MODEL [DIRECTORY]`.

It prints one JSON object per line: `{"total": ..., "completed": ...}` in bytes while it runs, then `{"size": ...}` or
`{"error": ...}`. A process can be ended at any time, which a download in a thread cannot; what it has fetched stays,
and the next download of the model goes on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError, QuireError
from quire.model_cache.cache import size_of_tree
from quire.models.hub import HubModel

INTERVAL_S = 0.5


def say(**fields: Any) -> None:
    """Print a line; end the process if its reader has gone."""
    try:
        print(json.dumps(fields), flush=True)
    except BrokenPipeError:
        os._exit(1)


def fetch(model: HubModel) -> Path:
    """Download a model and report the progress.

    Raises:
        ModelLoadError: it cannot be fetched, or the disk has no room for it.
    """
    total, missing = model.size()
    _check_room(model, missing)
    blobs, done = model.blobs(), threading.Event()
    begin = _bytes_in(blobs)
    ahead = total - missing

    def report() -> None:
        while not done.wait(INTERVAL_S):
            say(total=total, completed=min(total, ahead + max(0, _bytes_in(blobs) - begin)))

    say(total=total, completed=ahead)
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        return model.find()
    finally:
        done.set()
        reporter.join()


def _check_room(model: HubModel, missing: int) -> None:
    folder = model.blobs()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ModelLoadError(
            f"{model.id} needs {missing / 1e9:.1f} GB more, and the disk of its cache has {free / 1e9:.1f} GB; "
            "remove other models (quire rm)"
        )


def _bytes_in(folder: Path) -> int:
    """Return the bytes of all files, of which some may be renamed meanwhile."""
    total = 0
    for name in os.listdir(folder) if folder.is_dir() else ():
        try:
            total += (folder / name).stat().st_size
        except FileNotFoundError:
            continue
    return total


def main(arguments: list[str]) -> int:
    name, _, gguf = arguments[0].partition(":")
    model = HubModel(name, gguf or None, None, arguments[1] if len(arguments) > 1 else None)
    try:
        say(size=size_of_tree(fetch(model)))
    except QuireError as error:
        say(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
