"""The C++ CPU kernels as the rest of quire sees them; torch-free, and nothing is loaded before the first question."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PATH = Path(os.environ.get("QUIRE_CPU_LIBRARY") or Path(__file__).with_name("libquire_cpu.so"))
"""Where the library is, if it was built; QUIRE_CPU_LIBRARY names another build of it."""


def available() -> bool:
    """Whether the kernels were built and are not switched off; asked before torch is there."""
    return PATH.exists() and os.environ.get("QUIRE_KERNELS", "auto") != "reference"


def supports(dtype: torch.dtype) -> bool:
    """Whether the library is present and computes on this dtype."""
    from quire.kernels.cpu import library

    return dtype in library.DTYPE_CODES and library.loaded() is not None


def multiplies_bfloat16() -> bool:
    """Whether products of bfloat16 weights are faster with activations that are rounded to bfloat16, too."""
    from quire.kernels.cpu import library

    loaded = library.loaded()
    return loaded is not None and loaded.isa in ("avx512bf16", "amx")


def status() -> str:
    """What was loaded and why, or why nothing was: one phrase for people."""
    from quire.kernels.cpu import library

    return library.status()
