# SPDX-License-Identifier: Apache-2.0
"""Names, dtypes and shapes of tensors that a trainer sends, and the safetensors header for them; checksums of weights.

Invariant: torch-free. Sizes follow from dtype and shape alone, and are bounded before anything is allocated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import EngineError, ValidationError

MAX_TENSORS = 200_000
MAX_NAME_CHARS = 512
MAX_DIMS = 8
DTYPES: Mapping[str, tuple[str, int]] = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
}
"""torch's name of a dtype -> its code in safetensors, bytes of an element."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor by the checkpoint's name; `dtype` is torch's name without its module."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def read_specs(info: Mapping[str, Any]) -> list[TensorSpec]:
    """Return the tensors of an `update_info` with `names`, `dtype_names` and `shapes`.

    Raises:
        ValidationError: a list is missing or of another length, or an entry is malformed or there twice.
    """
    lists = [info.get(key) for key in ("names", "dtype_names", "shapes")]
    if not all(isinstance(one, list) for one in lists) or len({len(one or ()) for one in lists}) != 1:
        raise _wrong("has no lists names, dtype_names and shapes of one length")
    names, dtypes, shapes = (one or [] for one in lists)
    if not 0 < len(names) <= MAX_TENSORS:
        raise _wrong(f"names {len(names)} tensors: at least 1 and at most {MAX_TENSORS} are allowed")
    specs = [read_spec(*each) for each in zip(names, dtypes, shapes, strict=True)]
    if len({spec.name for spec in specs}) < len(specs):
        raise _wrong("names a tensor twice")
    return specs


def read_spec(name: Any, dtype: Any, shape: Any) -> TensorSpec:
    """Return a checked tensor.

    Raises:
        ValidationError: the name, dtype or shape is malformed.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise _wrong(f"has a tensor name that is no text of 1 to {MAX_NAME_CHARS} characters")
    kind = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    if not isinstance(kind, str) or kind not in DTYPES:
        raise _wrong(f"gives tensor {name!r} the dtype {dtype!r:.40}; allowed are {', '.join(DTYPES)}")
    is_shape = isinstance(shape, list | tuple) and len(shape) <= MAX_DIMS
    if not is_shape or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        raise _wrong(f"gives tensor {name!r} a shape that is no list of up to {MAX_DIMS} sizes")
    return TensorSpec(name, kind, tuple(shape))


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of all tensors together."""
    return sum(spec.num_bytes for spec in specs)


def header_of(specs: Sequence[TensorSpec]) -> bytes:
    """Return the beginning of a safetensors file whose data are these tensors, in order."""
    entries, start = {}, 0
    for spec in specs:
        end = start + spec.num_bytes
        code, _ = DTYPES[spec.dtype]
        entries[spec.name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _wrong(problem: str) -> ValidationError:
    return ValidationError(f"update_info {problem}", param="update_info")


def merged(cores: Sequence[Sequence[Mapping[str, str]]]) -> dict[str, str]:
    """Return name -> digest of one replica; with several ranks a name ends in "@" and the rank.

    Raises:
        EngineError: replicas have different weights.
    """
    each = [_of_core(ranks) for ranks in cores]
    if any(other != each[0] for other in each):
        raise EngineError("replicas have different weights")
    return each[0]


def _of_core(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    if len(ranks) == 1:
        return dict(ranks[0])
    return {f"{name}@{rank}": digest for rank, one in enumerate(ranks) for name, digest in one.items()}


def check_baseline(baseline: Any) -> Mapping[str, str]:
    """Return a baseline of digests.

    Raises:
        ValidationError: it is none.
    """
    if not isinstance(baseline, Mapping) or not all(isinstance(one, str) for one in baseline.values()):
        raise ValidationError(
            "baseline must be an object of name -> digest, as checksum returns it", param="baseline"
        )
    return baseline


def compare(now: Mapping[str, str], baseline: Mapping[str, str]) -> list[str]:
    """Return the names whose digests differ, or that only one of both has."""
    return sorted(name for name in now.keys() | baseline.keys() if now.get(name) != baseline.get(name))
