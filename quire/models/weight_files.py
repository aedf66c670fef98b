# SPDX-License-Identifier: Apache-2.0
"""Names and places of the tensors of a checkpoint in safetensors, without torch.

Invariant: only headers are parsed here. A malformed header yields no tensors: the loader, which opens every file,
reports it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.config.arch import Multimodal
from quire.errors import ModelLoadError
from quire.models.checkpoint_files import MAX_TEXT_BYTES, has_file, unreadable
from quire.models.gguf.model import is_gguf, part_paths
from quire.models.json_object import optional_json_object, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_INDEX_END = ".safetensors.index.json"
_NAMED = "transformers_weights"
"""Key of config.json that names the file, or the index, of the weights."""
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth")
_CHUNK = 1 << 20  # bytes compared at a time


def all_weight_files(model_dir: Path, folders: Iterable[str] = ()) -> list[tuple[str, Path]]:
    """Return the files of the checkpoint and of folders in it, each with its folder's name, or "".

    Raises:
        ModelLoadError: as `weight_files`.
    """
    return [(folder, path) for folder in ("", *folders) for path in weight_files(model_dir / folder)]


def companion_files(part_of: Multimodal | None) -> list[Path]:
    """Return the files of the parts of a multimodal model that are in checkpoints of their own.

    Raises:
        ModelLoadError: as `weight_files`.
    """
    places = [] if part_of is None else part_of.companion_dirs
    return [path for place in places for path in weight_files(Path(place))]


def weight_files(model_dir: Path) -> list[Path]:
    """Return the files that make up the checkpoint.

    These are a model in GGUF, or else, as in transformers, the file or index that config.json names, or
    model.safetensors, or the files in the index; or all *.safetensors.

    Raises:
        ModelLoadError: there are none, or the index is malformed or names a missing file.
    """
    if is_gguf(model_dir):
        return part_paths(model_dir)
    first = _first_file(model_dir)
    if first is not None:
        return _indexed_files(first) if first.name.endswith(_INDEX_END) else [first]
    found = sorted(path for path in model_dir.glob("*.safetensors") if path.name != _ADAPTER_WEIGHTS)
    if not found:
        pickled = sorted(path.name for pattern in _PICKLED for path in model_dir.glob(pattern))
        hint = f"; {', '.join(pickled[:3])} cannot be used, convert to safetensors" if pickled else ""
        raise ModelLoadError(f"{model_dir}: no *.safetensors file{hint}")
    return found


def _first_file(model_dir: Path) -> Path | None:
    """Return the file or the index by which the checkpoint begins; None if no usual name is there."""
    config = optional_json_object(model_dir / "config.json")
    if _NAMED in config:
        name = config.text(_NAMED)
        if name != Path(name).name or not name.endswith((".safetensors", _INDEX_END)):
            raise config.wrong(_NAMED, "the name of a *.safetensors file or its index in the same directory")
        if not has_file(model_dir / name):
            raise ModelLoadError(f"{model_dir}: {_NAMED} of config.json names {name}, which is missing")
        return model_dir / name
    found = [model_dir / name for name in (SINGLE_NAME, INDEX_NAME) if has_file(model_dir / name)]
    return found[0] if found else None


def _indexed_files(path: Path) -> list[Path]:
    model_dir, index = path.parent, read_json_object(path)
    names = list(index.child("weight_map").values.values())
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise index.wrong("weight_map", "an object of tensor name -> name of a file in the same directory")
    missing = sorted(name for name in set(names) if not has_file(model_dir / name))
    if missing:
        raise ModelLoadError(f"{model_dir}: {path.name} names {missing[0]}, which is missing")
    return [model_dir / name for name in sorted(set(names))]


@dataclass(frozen=True)
class StoredTensor:
    """Entry of a safetensors header; `start` and `end` are byte positions in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def equals(self, other: StoredTensor) -> bool:
        """Return whether the other tensor has the same dtype, shape and bytes."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return all(one == another for one, another in zip(self._chunks(), other._chunks(), strict=True))

    def _chunks(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.start)
            for start in range(self.start, self.end, _CHUNK):
                yield file.read(min(_CHUNK, self.end - start))


class StoredTensors:
    """Tensors of the checkpoint in a directory, by the names in its files."""

    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in the index, or else in the headers; empty if there are no such files.

        Raises:
            ModelLoadError: the system does not let us read a file.
        """
        first = _first_file(self._dir)
        if first is not None and first.name.endswith(_INDEX_END):
            return tuple(read_json_object(first).child("weight_map").values)
        return tuple(self._all)

    def find(self, name: str) -> StoredTensor | None:
        return self._all.get(name)

    @cached_property
    def _all(self) -> dict[str, StoredTensor]:
        try:
            paths = weight_files(self._dir)
        except ModelLoadError:  # raised again by the loader, if weights are to be loaded at all
            return {}
        return {name: tensor for path in paths for name, tensor in _header(path).items()}


def _header(path: Path) -> dict[str, StoredTensor]:
    if not has_file(path):
        return {}
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size <= MAX_TEXT_BYTES else b""
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    entries = header.items() if isinstance(header, dict) else ()
    found = ((name, _entry(path, 8 + size, entry)) for name, entry in entries if name != "__metadata__")
    return {name: tensor for name, tensor in found if tensor is not None}


def _entry(path: Path, data: int, entry: Any) -> StoredTensor | None:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            return StoredTensor(path, dtype, tuple(shape), data + start, data + end)
    return None
