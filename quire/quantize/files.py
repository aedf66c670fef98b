# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directory that appears complete or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError, StartupError
from quire.models.safetensors_file import DTYPES
from quire.models.weight_files import INDEX_NAME

_OTHERS = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
_CODES = {dtype: code for code, dtype in DTYPES.items()}
CONFIG_NAME = "config.json"


@contextmanager
def new_checkpoint(output: Path) -> Iterator[CheckpointWriter]:
    """Yield a writer of files that are renamed to `output` at the end, or deleted if anything fails.

    Leftovers of a killed run are deleted first.

    Raises:
        ConfigError: the directory exists already, or another process writes it.
        StartupError: it cannot be written.
    """
    draft = output.parent / f".{output.name}.unfinished"
    try:
        draft.mkdir(parents=True, exist_ok=True)
        with _held(draft, output):
            try:
                _clear(draft, output)
                yield CheckpointWriter(draft)
                draft.rename(output)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    except OSError as error:
        raise StartupError(f"--output {output} cannot be written: {error.strerror or error}") from error


@contextmanager
def _held(draft: Path, output: Path) -> Iterator[None]:
    """Lock the directory; the system releases the lock when the process ends, however it does."""
    directory = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(directory, output)
        yield
    finally:
        os.close(directory)


def _lock(directory: int, output: Path) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"--output {output} is being written by another process: name a new directory"
        ) from None


def _clear(draft: Path, output: Path) -> None:
    if output.exists():
        raise ConfigError(f"--output {output} exists already: name a new directory")
    for path in draft.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


class CheckpointWriter:
    """Writer of tensors, file by file, and then of the checkpoint's other files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[Mapping[str, Tensor] | list[str]] = []
        self._num_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write one file of tensors."""
        write_safetensors(self._directory / str(len(self._files)), tensors)
        self._files.append(list(tensors))
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self, source: Path, quantization: Mapping[str, Any]) -> None:
        """Write the index, the config of `source` with the new `quantization_config`, and its other files."""
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._files):
            file = f"model-{index + 1:05}-of-{len(self._files):05}.safetensors"
            (self._directory / str(index)).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index_of = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        _write_json(self._directory / INDEX_NAME, index_of)
        for path in {path for pattern in _OTHERS for path in source.glob(pattern)}:
            if path.name not in (CONFIG_NAME, INDEX_NAME):
                copy = self._directory / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
        config = json.loads((source / CONFIG_NAME).read_text(encoding="utf-8"))
        _write_json(self._directory / CONFIG_NAME, config | {"quantization_config": quantization})


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file in the safetensors format.

    Raises:
        OSError: it cannot be written.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        offsets = [position, position + tensor.nbytes]
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
