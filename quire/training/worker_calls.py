# SPDX-License-Identifier: Apache-2.0
"""Functions that run on a worker: plain data in, plain data out (`quire.features.WORKER_CALLS`)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ConfigError, ModelLoadError, QuireError, ValidationError
from quire.models.base import CausalLM
from quire.models.weights import open_files
from quire.worker.worker import Worker

logger = logging.getLogger(__name__)

STRETCH = 1 << 18
"""Elements that are looked at together, so that they stay in the processor's cache."""
EXPONENTS: Mapping[torch.dtype, tuple[type, int]] = {
    torch.float64: (np.int64, 0x7FF0000000000000),
    torch.float32: (np.int32, 0x7F800000),
    torch.float16: (np.int16, 0x7C00),
    torch.bfloat16: (np.int16, 0x7F80),
    torch.float8_e5m2: (np.int8, 0x7C),
    torch.float8_e4m3fn: (np.int8, 0x7F),
}
"""Bits that are all set in infinities and NaNs alone, and the integer of the same size."""


@torch.no_grad()
def weight_checksums(worker: Worker) -> dict[str, str]:
    """Return layer and tensor -> SHA-256 of the tensor in its final form, packed or quantized."""
    return {name: _digest(tensor) for name, tensor in _final_tensors(worker.model)}


def _final_tensors(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    for names, layer in model.checkpoint_layers():
        for name, tensor in layer.tensors().items():
            yield f"{'+'.join(names)}.{name}", tensor


def _digest(tensor: Tensor) -> str:
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    kind = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return hashlib.sha256(kind + whole.view(torch.uint8).numpy().tobytes()).hexdigest()


@torch.no_grad()
def check_finite(worker: Worker, model_dir: str) -> None:
    """Check that the floats of a checkpoint are finite; the first rank does it for all.

    Raises:
        ValidationError: a tensor has a NaN or an infinity, or a file is malformed.
    """
    if worker.rank:
        return
    try:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for name, is_finite in threads.map(_check_part, _float_parts(Path(model_dir))):
                if not is_finite:
                    raise ValidationError(
                        f"tensor {name!r} has values that are not finite; the old weights stay",
                        param="update_info",
                    )
    except ModelLoadError as error:
        raise ValidationError(str(error).replace(f"{model_dir}/", ""), param="update_info") from None


def _float_parts(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the floats of a checkpoint with their tensor's name, in parts of a few MiB."""
    for file in open_files(model_dir):
        for info in file.tensors.values():
            if info.dtype in EXPONENTS:
                whole = file.part(info, tuple(slice(0, size) for size in info.shape))
                yield from ((info.name, part) for part in torch.split(whole.reshape(-1), 16 * STRETCH))


def _check_part(part: tuple[str, Tensor]) -> tuple[str, bool]:
    return part[0], _is_finite(part[1])


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite, by their bits: arithmetic would be several times slower."""
    integer, bits = EXPONENTS[tensor.dtype]
    codes: NDArray[Any] = tensor.reshape(-1).view(torch.uint8).numpy().view(integer)
    mask = integer(bits)
    masked: NDArray[Any] = np.empty(min(STRETCH, len(codes)), dtype=integer)
    for start in range(0, len(codes), STRETCH):
        part = codes[start : start + STRETCH]
        if np.bitwise_and(part, mask, out=masked[: len(part)]).max() == mask:
            return False
    return True


def collective_rpc(worker: Worker, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a public method of the extension class: a list, an object, None, or else text.

    Raises:
        ValidationError: there is no such class or method, or it failed.
    """
    extension = worker.extension
    if extension is None:
        raise ValidationError(
            "no methods can be called: start with --worker-extension-cls module:Class", param="method"
        )
    if method not in extension.methods:
        known = ", ".join(sorted(extension.methods)) or "none"
        raise ValidationError(
            f"method {method!r:.80} is not one of the extension class: {known}", param="method"
        )
    try:
        result = extension.methods[method](*args, **kwargs)
    except (QuireError, ConfigError):
        raise
    except Exception as error:  # the operator's code, or arguments of the caller
        logger.exception("the method %r of the worker extension failed", method)
        raise ValidationError(
            f"method {method!r} failed: {type(error).__name__}: {error}", param="method"
        ) from None
    return result if result is None or is_plain(result) else str(result)


def is_plain(value: Any, depth: int = 16) -> bool:
    """Return whether a list or object has plain data only, so that it can go to the client as it is."""
    if not isinstance(value, list | dict) or depth == 0:
        return False
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return False
    parts = chain(value.values() if isinstance(value, dict) else value)
    return all(isinstance(one, str | bool | int | float | None) or is_plain(one, depth - 1) for one in parts)
