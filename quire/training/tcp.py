# SPDX-License-Identifier: Apache-2.0
"""Tensors over TCP: this side connects to a trainer's address, which the operator has allowed.

Per update the trainer sends the number of bytes (8, little-endian), then the tensors one behind the other. Invariant:
no more is read than the update's tensors take, and each read ends within a bounded time.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from quire.errors import UnavailableError, ValidationError

GREETING = b"quire-weights 1\n"
"""First bytes of this side, so that a trainer detects another program."""
PREFIX_BYTES = 8
SILENCE_S = 60.0


class WeightStream:
    """Connection to a trainer.

    Raises:
        UnavailableError: the trainer does not accept it.
    """

    def __init__(self, host: str, port: int, silence_s: float = SILENCE_S) -> None:
        self.address = f"{host}:{port}"
        try:
            self._socket = socket.create_connection((host, port), timeout=silence_s)
            self._socket.sendall(GREETING)
        except OSError as error:
            raise UnavailableError(
                f"the trainer at {self.address} cannot be reached: {error.strerror or error}"
            ) from None

    def expect(self, num_bytes: int) -> None:
        """Read the beginning of an update, whose tensors take this many bytes.

        Raises:
            ValidationError: the trainer has another number, or has ended.
        """
        prefix = bytearray(PREFIX_BYTES)
        self.fill(memoryview(prefix))
        given = int.from_bytes(prefix, "little")
        if given != num_bytes:
            raise self._wrong(f"announces {given} bytes; the tensors take {num_bytes}")

    def fill(self, memory: memoryview) -> None:
        """Fill memory with the next bytes.

        Raises:
            ValidationError: the trainer has ended, or is silent for too long.
        """
        while len(memory):
            try:
                count = self._socket.recv_into(memory)
            except OSError as error:
                raise self._wrong(f"stopped sending: {error.strerror or error}") from None
            if count == 0:
                raise self._wrong("has closed the connection")
            memory = memory[count:]

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._socket.close()

    def _wrong(self, problem: str) -> ValidationError:
        return ValidationError(f"the trainer at {self.address} {problem}", param="update_info")


def read_address(text: Any, allowed: Sequence[str] | None) -> tuple[str, int]:
    """Return host and port of "host:port".

    Args:
        allowed: addresses that the operator allows; None: all, for programs.

    Raises:
        ValidationError: the address is malformed or not allowed.
    """
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValidationError(f"address {text!r:.100} is not of the form host:port", param="init_info")
    if allowed is not None and text not in allowed:
        these = ", ".join(allowed) or "none; the operator allows some with --weight-transfer-addresses"
        raise ValidationError(f"address {text!r:.100} is not allowed; allowed: {these}", param="init_info")
    return host.strip("[]"), int(port)
