"""The C++ CPU kernels as the table of ops sees them; nothing is loaded before the first question."""

import torch


def supports(dtype: torch.dtype) -> bool:
    """Whether the library is present and computes on this dtype."""
    from quire.kernels.cpu import library

    return dtype in library.DTYPE_CODES and library.loaded() is not None


def status() -> str:
    """What was loaded and why, or why nothing was: one phrase for people."""
    from quire.kernels.cpu import library

    return library.status()
