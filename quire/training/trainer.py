# SPDX-License-Identifier: Apache-2.0
"""A trainer's side: tensors into shared memory, or to engines that connect by TCP.

Args of all: tensors by the checkpoint's names, as torch tensors or arrays. The `update_info` that each returns is the
body of /update_weights, or the argument of `WeightUpdates.update`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ValidationError
from quire.training.transports import FOLDER, GREETING, PREFIX_BYTES, SILENCE_S


def describe(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return names, dtypes and shapes, as an `update_info` has them."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def write_segment(name: str, tensors: Mapping[str, Tensor], folder: Path = FOLDER) -> dict[str, Any]:
    """Write tensors to a new segment of shared memory; the caller removes it by `remove_segment`.

    Raises:
        OSError: it exists, or memory is short.
    """
    fd = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        for part in _parts(tensors.values()):
            file.write(part)
    return {"segment": name, **describe(tensors)}


def remove_segment(name: str, folder: Path = FOLDER) -> None:
    """Remove a segment, if it is there."""
    (folder / name).unlink(missing_ok=True)


class WeightServer:
    """Listener to which an engine connects.

    Args:
        host: address of this machine that the operator of the engine allows.
        port: 0: a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._listener = socket.create_server((host, port))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._engine: socket.socket | None = None

    def accept(self, timeout_s: float = SILENCE_S) -> None:
        """Wait for the engine.

        Raises:
            OSError: none comes.
            ValidationError: another program has connected.
        """
        self._listener.settimeout(timeout_s)
        self._engine, _ = self._listener.accept()
        self._engine.settimeout(timeout_s)
        greeting = b""
        while len(greeting) < len(GREETING):
            part = self._engine.recv(len(GREETING) - len(greeting))
            if not part:
                break
            greeting += part
        if greeting != GREETING:
            raise ValidationError(f"{greeting!r} is no greeting of an engine")

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send the tensors of one update, which `describe` describes; the engine reads them during that update."""
        assert self._engine is not None, "accept() comes first"
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._engine.sendall(num_bytes.to_bytes(PREFIX_BYTES, "little"))
        for part in _parts(tensors.values()):
            self._engine.sendall(part)

    def close(self) -> None:
        """Close the connection and the listener."""
        if self._engine is not None:
            self._engine.close()
        self._listener.close()


def _parts(tensors: Iterable[Tensor]) -> Iterable[memoryview]:
    for tensor in tensors:
        flat = torch.as_tensor(tensor).detach().cpu().contiguous().reshape(-1)
        yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy 2 on Python 3.11
