# SPDX-License-Identifier: Apache-2.0
"""Target of a run, and its description."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib import metadata

import torch


@dataclass(frozen=True)
class Target:
    """A device, at full size or, `tiny`, with shapes that a CPU is done with in seconds."""

    device: torch.device
    tiny: bool

    @property
    def is_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Precisions to check; Triton's interpreter multiplies bfloat16 wrongly."""
        wide = (torch.float32, torch.float16)
        return (torch.bfloat16, *wide) if self.is_gpu else wide

    @property
    def main_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_gpu else torch.float32

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def answers(self) -> bool:
        """Whether the device still works for this process."""
        try:
            return torch.zeros(1, device=self.device).item() == 0.0
        except RuntimeError:
            return False

    def allocated_bytes(self) -> int:
        """Memory that tensors hold on the device."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else f"a CPU ({platform.machine()})"

    def description(self) -> str:
        """Device and versions, one line for people."""
        versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "transformers"))
        return f"{self.name()}, Python {platform.python_version()}, {versions}"


def make_target(device: str, tiny: bool) -> Target:
    """The target of the command line; ends the process if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; a dry run on a CPU: --device cpu --tiny")
    return Target(torch.device(device), tiny)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
