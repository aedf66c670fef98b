"""How many threads compute.

Invariant: torch's operations and the kernels have as many. Each has threads of its own; those with nothing to do sleep.
"""

import torch

from quire.kernels.cpu import library


def set_num_threads(count: int) -> None:
    """For the whole process: all engines in it share the threads of the kernels."""
    torch.set_num_threads(count)
    loaded = library.loaded()
    if loaded is not None:
        loaded.set_threads(count)
