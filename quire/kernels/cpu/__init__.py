# SPDX-License-Identifier: Apache-2.0
"""Availability of the C++ CPU kernels; torch-free, and nothing is loaded before the first query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kernels.cpu.instruction_sets import PATH, available

if TYPE_CHECKING:
    import torch

__all__ = ["PATH", "available", "multiplies_bfloat16", "status", "supports"]


def supports(dtype: torch.dtype) -> bool:
    """Return whether the library is present and supports this dtype."""
    from quire.kernels.cpu import library

    return dtype in library.DTYPE_CODES and library.loaded() is not None


def multiplies_bfloat16() -> bool:
    """Return whether bfloat16 weights multiply faster with activations rounded to bfloat16, too."""
    from quire.kernels.cpu import library

    loaded = library.loaded()
    return loaded is not None and loaded.isa in ("avx512bf16", "amx")


def status() -> str:
    """Return what was loaded and why, or why nothing was: one phrase for users."""
    from quire.kernels.cpu import library

    return library.status()
