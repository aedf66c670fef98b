"""The Triton GPU kernels as the rest of quire sees them; nothing is loaded before the first question."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICE_TYPES = ("cuda", "xpu")
"""What Triton compiles for under torch's names; ROCm calls itself cuda."""


@cache
def available() -> bool:
    """Whether Triton is installed and its kernels are not switched off."""
    return find_spec("triton") is not None and os.environ.get("QUIRE_KERNELS", "auto") != "reference"


def supports(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the kernels compute on this dtype there."""
    return device_type in DEVICE_TYPES and available() and dtype.itemsize >= 2 and dtype.is_floating_point


def status() -> str:
    """Why the kernels are, or are not, in use: one phrase for people."""
    return "Triton is installed" if available() else "Triton is not installed (or switched off)"
