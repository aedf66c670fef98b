# SPDX-License-Identifier: Apache-2.0
"""Cache of a model's finished weights in one file, which the next start maps.

A file is in the safetensors format, with entries that pad to pages, and ends with a seal: SHA-256 over its key and the
weighted sum of each page. The key, also part of the file's name, is a hash of everything that determines the weights.
Invariant: `read` returns the tensors given to `write` under the same key. One or two flipped bits of a page, and two
swapped words, are always detected; other damage keeps a sum only by coincidence. A file appears by renaming, so it is
never read half written, and several writers at once do no harm.
"""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.base import Layer
from quire.layers.matrix import MatrixLayer
from quire.models.base import CausalLM
from quire.models.bounded_directory import BoundedDirectory
from quire.models.file_digests import files_fingerprint
from quire.models.safetensors_file import DTYPES, SafetensorsFile
from quire.models.weight_files import all_weight_files, companion_files
from quire.version import __version__

logger = logging.getLogger(__name__)

FORMAT = 6
"""Version of the format, to be raised if the same key would stand for other contents."""
SUFFIX = "safetensors"
PAGE = 4096
WORDS = PAGE // 4
PAGES_AT_ONCE = 256
STRETCH = 2048 * PAGE
"""Bytes that a thread sums at a time."""

_FILLER = "_filler."
_SEAL = "_seal"
_SEAL_BYTES = hashlib.sha256().digest_size
_ORDINALS = np.arange(WORDS)
_WEIGHTS = (2.0 * (_ORDINALS * (_ORDINALS + 1) // 2 % 2048) + 1).astype(np.float64)
"""Factors of a page's words, as signed integers of 32 bits, in its sum. They are odd, so that no two flips cancel out,
and all different and unevenly spaced, so that neither do swaps of words or of pairs of words. The sum stays below 2^53,
where doubles are exact in any order."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def packed_key(model: CausalLM, layout: str) -> str:
    """Return a hash of everything that determines the finished weights of a model without weights.

    `layout` names the packed form of this machine's kernels. A checkpoint's files enter by path, size, inode, the times
    of their last changes (the status change cannot be set back), and a digest of their first and last bytes: one of all
    bytes would take as long as packing them. The model enters by its config, the shapes of its layers, which another
    version may merge differently, and the rank of their shard.

    Raises:
        ModelLoadError: there are no files.
    """
    config = model.config
    is_random = config.load.load_format == "dummy"
    own = [] if is_random else [path for _, path in all_weight_files(Path(config.model_dir), model.folders)]
    files = own + ([] if is_random else companion_files(config.arch.part_of))
    parts = {
        "format": (FORMAT, __version__, layout),
        "arch": dataclasses.asdict(dataclasses.replace(config.arch, generation={})),
        "layers": [
            (names, _shapes(layer), (layer.shard.rank, layer.shard.of), _packs_apart(layer))
            for names, layer in model.checkpoint_layers()
        ],
        "quantization": dataclasses.asdict(config.quantization),
        "seed": config.model.seed if not files else None,
        "files": [(str(path), *_state(path)) for path in files],
        "edges": files_fingerprint(files).hex(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=sorted).encode()).hexdigest()


def _shapes(layer: Layer) -> dict[str, tuple[object, ...]]:
    return {name: (_CODES[param.dtype], *param.shape) for name, param in layer.tensors().items()}


def _packs_apart(layer: Layer) -> bool:
    """Return whether a layer's values are packed apart from its queries and keys."""
    return isinstance(layer, MatrixLayer) and layer.method.values is not None


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class PackedCache:
    """File of one model in a directory; an unusable directory costs only a warning."""

    def __init__(self, directory: BoundedDirectory, name: str, key: str) -> None:
        self._directory = directory
        self._key = key
        self.path = directory.place(name, key)

    def read(self) -> dict[str, Tensor] | None:
        """Return the tensors, in the file's own memory; None if the file is missing or damaged."""
        started = time.monotonic()
        if not os.path.exists(self.path):
            return None
        try:
            file = SafetensorsFile(self.path)
            self._check(file)
        except ModelLoadError as error:
            logger.warning("packing the weights again: %s", error)
            return None
        self._directory.touch(self.path)
        infos = [info for info in file.tensors.values() if not info.name.startswith("_")]
        logger.info("packed weights mapped from %s in %.2f s", self.path, time.monotonic() - started)
        return {info.name: file.tensor(info) for info in infos}

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors for the next start."""
        started = time.monotonic()
        header = _header(tensors)
        num_bytes = sum(part.nbytes + -part.nbytes % PAGE for part in (header, *tensors.values()))
        try:
            with self._directory.new_file(self.path, num_bytes + _SEAL_BYTES) as file:
                self._write(file, header, tensors)
        except OSError as error:
            logger.warning("packed weights cannot be stored in %s: %s", self._directory.path, error.strerror)
            return
        logger.info("packed weights written to %s in %.2f s", self.path, time.monotonic() - started)

    def _write(self, file: BinaryIO, header: Tensor, tensors: Mapping[str, Tensor]) -> None:
        seal = self._new_seal()
        for part in (header, *tensors.values()):
            for pages in _whole_pages(part):
                file.write(pages.numpy().data)
                seal.update(_sums(pages))
        file.write(seal.digest())

    def _check(self, file: SafetensorsFile) -> None:
        """Raise ModelLoadError if the seal is missing or broken."""
        info, seal = file.tensors.get(_SEAL), self._new_seal()
        if info is not None and (info.start % PAGE, info.end - info.start) == (0, _SEAL_BYTES):
            for sums in _parallel_sums(file.raw(0, info.start)):
                seal.update(sums)
            if file.raw(info.start, info.end).numpy().tobytes() == seal.digest():
                return
        raise ModelLoadError(f"{self.path}: is damaged, or was written for something else")

    def _new_seal(self) -> "hashlib._Hash":
        return hashlib.sha256(self._key.encode())


def _header(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes before the data of `tensors`, each at the start of a page: uint8 [n]."""
    entries: dict[str, Any] = {}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        entries[name] = _entry(_CODES[tensor.dtype], list(tensor.shape), position, end)
        position = end + -end % PAGE
        if position > end:
            entries[f"{_FILLER}{name}"] = _entry("U8", [position - end], end, position)
    entries[_SEAL] = _entry("U8", [_SEAL_BYTES], position, position + _SEAL_BYTES)
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % PAGE)
    return torch.frombuffer(bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8)


def _whole_pages(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor, padded with zeros: uint8 [n] with n a multiple of a page."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // PAGE * PAGE
    yield flat[:whole]
    yield torch.nn.functional.pad(flat[whole:], (0, (whole - len(flat)) % PAGE))


def _parallel_sums(pages: Tensor) -> Iterator[bytes]:
    """Yield `_sums` of consecutive stretches, computed on all cores: a file's pages are mapped as they are touched."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(_sums, pages.split(STRETCH))


def _sums(pages: Tensor) -> bytes:
    """Return the weighted sum of each page: float64 [n]."""
    words = pages.numpy().view(np.int32).reshape(-1, WORDS)
    sums, doubles = np.empty(len(words)), np.empty((PAGES_AT_ONCE, WORDS))
    for start in range(0, len(words), PAGES_AT_ONCE):
        some = words[start : start + PAGES_AT_ONCE]
        np.copyto(doubles[: len(some)], some)
        np.dot(doubles[: len(some)], _WEIGHTS, out=sums[start : start + len(some)])
    return sums.tobytes()


def _entry(code: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": code, "shape": shape, "data_offsets": [start, end]}
