# SPDX-License-Identifier: Apache-2.0
"""Availability of the Triton GPU kernels; nothing is loaded before the first query."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICE_TYPES = ("cuda", "xpu")
"""Device types that Triton compiles for, as named by torch; ROCm is named cuda."""


@cache
def available() -> bool:
    """Return whether Triton is installed and its kernels are not switched off."""
    return find_spec("triton") is not None and os.environ.get("QUIRE_KERNELS", "auto") != "reference"


def supports(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether the kernels support this dtype on the device type."""
    return device_type in DEVICE_TYPES and available() and dtype.itemsize >= 2 and dtype.is_floating_point


def status() -> str:
    """Return why the kernels are, or are not, in use: one phrase for users."""
    return "Triton is installed" if available() else "Triton is not installed (or switched off)"
