# SPDX-License-Identifier: Apache-2.0
"""GGUF model: a file, or a split model's files as one.

Invariant: torch-free. All parts of a split are there, in order, and no tensor is in two of them.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Sequence
from pathlib import Path, PurePath

from quire.errors import ModelLoadError
from quire.models.checkpoint_files import has_file, unreadable
from quire.models.gguf.file import GgufFile, TensorEntry
from quire.models.json_object import JsonObject

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 10_000
MOST_OPEN = 8  # files that are remembered while an engine starts


def is_gguf(path: Path) -> bool:
    """Return whether a model path is a GGUF file."""
    return path.suffix == SUFFIX


def gguf_in(directory: Path) -> Path | None:
    """Return the only GGUF model in a directory; None if there is none.

    Raises:
        ModelLoadError: there are several.
    """
    found = sorted(path for path in directory.glob(f"*{SUFFIX}") if _is_model(path.name))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:8])
        raise ModelLoadError(f"{directory} has {len(found)} GGUF models: name one of {names}")
    return found[0] if found else None


def _is_model(name: str) -> bool:
    return is_first_part(name) and not is_projector(name)


def is_first_part(name: str) -> bool:
    """Return whether a file is a model or the first part of one."""
    match = _PART.fullmatch(name)
    return match is None or int(match["number"]) == 1


def is_projector(name: str) -> bool:
    """Return whether a file holds an image encoder for another model, by its name."""
    return "mmproj" in name.lower()


def choose_projector(names: Sequence[str]) -> str | None:
    """Return the encoder of a model among these files: the only one, or else the only one in float16."""
    found = [name for name in names if is_projector(PurePath(name).name)]
    if len(found) > 1:
        found = [name for name in found if "f16" in name.lower() and "bf16" not in name.lower()]
    return found[0] if len(found) == 1 else None


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the model that a file begins.

    Raises:
        ModelLoadError: it is not the first part.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if int(match["number"]) != 1 or not 1 <= count <= MAX_PARTS:
        raise ModelLoadError(f"{name}: is part {int(match['number'])} of {count}; name the first one")
    return [f"{match['stem']}-{number + 1:05}-of-{count:05}{SUFFIX}" for number in range(count)]


def part_paths(path: Path) -> list[Path]:
    """Return `part_names` for files on this machine.

    Raises:
        ModelLoadError: it is not the first part, or one is missing.
    """
    paths = [Path(name) for name in part_names(str(path))]
    missing = [each.name for each in paths if not has_file(each)]
    if missing and len(paths) > 1:
        raise ModelLoadError(f"{path}: {missing[0]}, another part of it, is missing")
    return paths


def opened_file(path: Path) -> GgufFile:
    """The file at a path, read once while it does not change: a start asks three times, and a vocabulary takes 0.1 s.

    Raises:
        ModelLoadError: as `GgufFile`.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return _opened_file(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=MOST_OPEN)
def _opened_file(path: Path, *state: int) -> GgufFile:
    return GgufFile(path)


def forget_files() -> None:
    """Let go of the files that were read; their vocabularies take tens of megabytes."""
    _opened_file.cache_clear()


_POOLINGS = {0: None, 1: "mean", 2: "cls", 3: "last"}
"""Values of `pooling_type` -> pooling method of embeddings."""


class GgufModel:
    """Metadata of the first file, and all tensors by name, each with its file.

    Raises:
        ModelLoadError: as `GgufFile` and `part_paths`; a tensor is in two files; the declared number of files or
            tensors is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [opened_file(part) for part in part_paths(path)]
        self.metadata = self.files[0].metadata
        self.tensors: dict[str, tuple[GgufFile, TensorEntry]] = {}
        for file in self.files:
            for name, entry in file.tensors.items():
                if name in self.tensors:
                    raise ModelLoadError(
                        f"{file.path}: tensor {name!r} is also in {self.tensors[name][0].path}"
                    )
                self.tensors[name] = (file, entry)
        self._check_split()
        self.architecture = self.about("general").text("architecture")
        self.own = self.about(self.architecture)
        """Keys of the architecture; it records which were read."""

    def about(self, group: str) -> JsonObject:
        """Return the keys with the prefix `group` and a dot, without the prefix."""
        prefix = f"{group}."
        keys = [key for key in self.metadata if key.startswith(prefix)]
        values = {key.removeprefix(prefix): self.metadata[key] for key in keys}
        return JsonObject(f"{self.path}: {group}", values)

    def floats(self, name: str) -> list[float] | None:
        """Return the numbers of a small float32 tensor; None if there is no such tensor."""
        if name not in self.tensors:
            return None
        file, entry = self.tensors[name]
        if entry.type.name != "F32":
            raise ModelLoadError(f"{file.path}: tensor {name!r} is {entry.type.name}; expected F32")
        return array("f", file.map[entry.start : entry.end]).tolist()

    def _check_split(self) -> None:
        split = self.about("split")
        declared = split.integer("count", 1, low=0) or 1
        if declared != len(self.files):
            raise ModelLoadError(
                f"{self.path}: split.count is {declared}, and its name says {len(self.files)}"
            )
        count = split.optional_integer("tensors.count", low=0)
        if count is not None and len(self.files) > 1 and count != len(self.tensors):
            raise ModelLoadError(
                f"{self.path}: split.tensors.count is {count}, and there are {len(self.tensors)}"
            )


def stated_pooling(model: GgufModel) -> str | None:
    """Return the file's pooling method for embeddings; None if it has none.

    Raises:
        ModelLoadError: the value is no integer.
        UnsupportedModelError: the method is unsupported, such as 4, which ranks pairs of texts.
    """
    value = model.own.integer("pooling_type", 0, low=-1)  # -1: not specified
    if value not in (-1, *_POOLINGS):
        raise model.own.unsupported(
            "pooling_type", ", ".join(f"{key} ({name})" for key, name in _POOLINGS.items())
        )
    return _POOLINGS.get(value)
