# SPDX-License-Identifier: Apache-2.0
"""Arrays in safetensors files, by which pixels cross processes.

Invariant: torch-free. A file appears whole or not at all; a reader checks every offset before it makes an array.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEAD = struct.Struct("<Q")
MAX_HEADER = 2**20
NAMES = {"uint8": "U8", "int64": "I64", "float32": "F32"}
DTYPES = {name: np.dtype(kind) for kind, name in NAMES.items()}
EMBEDS_DTYPES = DTYPES | {"F16": np.dtype(np.float16), "F64": np.dtype(np.float64)}


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> int:
    """Write arrays to a new file; return its size in bytes. Raises OSError."""
    header, start = {}, 0
    for name, array in arrays.items():
        place = [start, start + array.nbytes]
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
        start = place[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(HEAD.pack(len(text)) + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)
    os.replace(unfinished, path)
    return HEAD.size + len(text) + start


def read_arrays(content: bytes, dtypes: Mapping[str, np.dtype[Any]] = DTYPES) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file's content, as views of it.

    Raises:
        ValueError: the content is malformed; says where.
    """
    if len(content) < HEAD.size:
        raise ValueError("it ends before its header")
    (size,) = HEAD.unpack_from(content)
    if size > min(MAX_HEADER, len(content) - HEAD.size):
        raise ValueError("its header is longer than the file, or than 1 MiB")
    try:
        header = json.loads(content[HEAD.size : HEAD.size + size])
    except (ValueError, RecursionError):
        raise ValueError("its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    data = memoryview(content)[HEAD.size + size :]
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _array(name, entry, data, dtypes) for name, entry in tensors.items()}


def _array(name: str, entry: Any, data: memoryview, dtypes: Mapping[str, np.dtype[Any]]) -> NDArray[Any]:
    match entry:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(first), int(last)]} if (
            kind in dtypes
        ):
            dtype = dtypes[kind]
        case _:
            raise ValueError(f"{name!r:.60} must have dtype ({', '.join(dtypes)}), shape and data_offsets")
    if not all(type(side) is int and side >= 0 for side in shape) or not 0 <= first <= last <= len(data):
        raise ValueError(f"{name!r:.60} has a shape or offsets outside the file")
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r:.60} has a shape that does not match its offsets")
    return np.frombuffer(data[first:last], dtype).reshape(shape)


def array_of(value: Any) -> NDArray[Any]:
    """Return a value as an array; an empty one of objects if it is none, such as a ragged list."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.empty(0, dtype=object)
