# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device.

Invariant: work runs in order. An asynchronous device continues after a call has returned; a download may be read only
after waiting for a later mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor


class Mark(Protocol):
    """Point in the order of a device's work."""

    def wait(self) -> None:
        """Wait until all work before the mark is done."""

    def seconds_since(self, earlier: Mark) -> float:
        """Return the device time between two marks that have been waited for."""


class Transfers(Protocol):
    """Copies between host and device, in the order of the device's work."""

    torch_device: torch.device

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device; its memory may change afterwards only on an asynchronous device."""

    def download(self, tensor: Tensor) -> Tensor:
        """Copy a device tensor to the host; read it after waiting for a later mark."""

    def mark(self) -> Mark:
        """Return a mark after all work submitted so far."""

    def host_memory(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialized host bytes that `copy_blocks` can read and write."""

    def copy_blocks(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: list[tuple[int, int]]
    ) -> None:
        """Copy blocks (`CopyBlocks`) of tensors [blocks, bytes] uint8."""


Parts = TypeVar("Parts", bound=tuple[Any, ...])


def moved(parts: Parts, move: Callable[[Tensor], Tensor]) -> Parts:
    """Return a named tuple with its tensors moved by `Transfers.upload` or `Transfers.download`."""
    return type(parts)(*(move(part) if isinstance(part, Tensor) else part for part in parts))
