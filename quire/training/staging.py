# SPDX-License-Identifier: Apache-2.0
"""`StagedWeights`: a private directory that looks like the model's checkpoint, with the new weights.

Invariant: torch-free. An engine that starts with the directory loads the model with the new weights, so an update goes
through the same loader as a start. A file is there whole or not at all. The directory is removed by `close`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire import private_directories
from quire.errors import ModelLoadError, UnavailableError, ValidationError
from quire.models.weight_files import weight_files
from quire.training.tensors import TensorSpec, header_of, total_bytes

END = ".safetensors"
INDEX_END = ".safetensors.index.json"
_NAMES_WEIGHTS = "transformers_weights"
"""Key of config.json that names the file of the weights, which has another name here."""
CHUNK_BYTES = 8 * 2**20
SPARE_BYTES = 64 * 2**20
MOST_TIMES = 4
"""Multiple of the model's own weight files that an update may take: its dtype may be wider."""
UNKNOWN_BYTES = 2**36
"""Limit for a model without weight files."""

Fill = Callable[[memoryview], None]
"""Fills memory with the next bytes of a source; raises ValidationError if there are fewer."""


class StagedWeights:
    """Weights of one update.

    Args:
        model_dir: the model's own checkpoint, whose other files are linked.

    Raises:
        UnavailableError: the directory cannot be made.
    """

    def __init__(self, model_dir: Path) -> None:
        self._most_bytes = _most_bytes(model_dir)
        self._num_bytes = self._num_files = 0
        self._names: set[str] = set()
        with _room():
            self.directory = private_directories.make("weights-")
            _link_others(model_dir, self.directory)

    @property
    def is_empty(self) -> bool:
        return self._num_files == 0

    def link(self, place: Path) -> None:
        """Add the safetensors files of a directory, or one such file, without a copy.

        Raises:
            ValidationError: there are none.
        """
        try:
            paths = [place] if place.name.endswith(END) and place.is_file() else weight_files(place)
        except (ModelLoadError, OSError) as error:
            raise ValidationError(f"update_info: {error}", param="update_info") from None
        if not all(path.name.endswith(END) for path in paths):
            raise ValidationError(
                "update_info: weights of a GGUF file are not taken; give a directory of *.safetensors",
                param="update_info",
            )
        with _room():
            for path in paths:
                self._next_file().symlink_to(path.absolute())

    def write(self, specs: Sequence[TensorSpec], fill: Fill) -> None:
        """Add tensors whose bytes come in order from `fill`; nothing is added if that fails.

        Raises:
            ValidationError: a tensor is there already, or the update is too large.
            UnavailableError: the disk is full.
        """
        left = total_bytes(specs)
        twice = self._names.intersection(spec.name for spec in specs)
        if twice:
            raise ValidationError(
                f"tensor {min(twice)!r} was sent before in this update", param="update_info"
            )
        if self._num_bytes + left > self._most_bytes:
            raise ValidationError(
                f"the update would take {self._num_bytes + left} bytes; at most {self._most_bytes} are allowed, "
                f"{MOST_TIMES} times the model's weight files",
                param="update_info",
            )
        part = self.directory / "part"
        try:
            with _room(), part.open("wb") as file:
                file.write(header_of(specs))
                memory = memoryview(bytearray(min(CHUNK_BYTES, max(left, 1))))
                while left:
                    chunk = memory[: min(left, len(memory))]
                    fill(chunk)
                    file.write(chunk)
                    left -= len(chunk)
            part.rename(self._next_file())
        finally:
            part.unlink(missing_ok=True)
        self._num_bytes += total_bytes(specs)
        self._names.update(spec.name for spec in specs)

    def close(self) -> None:
        """Remove the directory; may be called twice."""
        private_directories.remove(self.directory)

    def _next_file(self) -> Path:
        self._num_files += 1
        return self.directory / f"update-{self._num_files:06d}{END}"


@contextmanager
def _room() -> Iterator[None]:
    """Turn an OSError of the directory into UnavailableError."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"the new weights cannot be stored: {error.strerror}; check TMPDIR and its free space"
        ) from error


def _most_bytes(model_dir: Path) -> int:
    try:
        known = sum(path.stat().st_size for path in weight_files(model_dir))
    except (ModelLoadError, OSError):
        return UNKNOWN_BYTES
    return MOST_TIMES * known + SPARE_BYTES


def _link_others(model_dir: Path, directory: Path) -> None:
    """Link everything of a checkpoint but its weights; config.json does not name them here."""
    for path in model_dir.iterdir():
        if path.name.endswith((END, INDEX_END)):
            continue
        if path.name == "config.json" and _NAMES_WEIGHTS in (text := path.read_text(errors="replace")):
            config = json.loads(text)
            config.pop(_NAMES_WEIGHTS, None)
            (directory / path.name).write_text(json.dumps(config))
        else:
            (directory / path.name).symlink_to(path.absolute())
