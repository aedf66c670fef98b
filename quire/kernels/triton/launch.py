# SPDX-License-Identifier: Apache-2.0
"""Common parts of launches: tile sizes, numbers of programs, rows of strided tensors, and reports of late compilations.

Invariant: a tile's size depends on properties of the model only, so that the reduction of an element never depends on
the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n (and 1)."""
    return 1 << max(n - 1, 0).bit_length()


def num_warps(tile: int) -> int:
    """Return the warps for a program that processes `tile` elements at a time: 8 elements a thread, 1 to 16 warps."""
    return min(max(tile // 256, 1), 16)


def in_pairs(dtype: torch.dtype) -> bool:
    """Return whether floats of a dtype can be decoded in pairs (`primitives`); Triton's interpreter and other vendors
    cannot.
    """
    import triton  # a CPU imports this file, too, and need not have it

    if dtype.itemsize != 2 or triton.knobs.runtime.interpret:
        return False
    backend: str = triton.runtime.driver.active.get_current_target().backend
    return backend == "cuda"


@cache
def num_processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 1 for the host, in Triton's interpreter."""
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    count: int = getattr(properties, "multi_processor_count", 0) or properties.max_compute_units
    return count


def rows_of(x: Tensor) -> tuple[int, int, int, int]:
    """Return a tensor [..., n] as outer x inner rows: (outer, inner, outer stride, inner stride), in elements.

    Leading dimensions except the last must merge into one, as those of a view [T, heads, D] do.
    """
    *leading, inner = x.shape[:-1] or (1,)
    outer = 1
    for size in leading:
        outer *= size
    inner_stride = x.stride(-2) if x.dim() > 1 else 0
    if not leading:
        return 1, inner, 0, inner_stride
    flat = x if x.dim() == 3 else x.flatten(0, -3) if x.dim() > 3 else x.unsqueeze(0)
    return outer, inner, flat.stride(0), inner_stride


def watch_compiles(tell: Callable[[str], None] | None) -> None:
    """Call `tell` with the name of every kernel that is compiled, or loaded from Triton's cache, from now on; None:
    stop.

    A process has one watcher.
    """
    from triton import knobs  # a CPU imports this file, too, and need not have it

    def notify(*, fn: object, **_facts: object) -> None:
        assert tell is not None
        tell(getattr(fn, "name", str(fn)))

    knobs.runtime.jit_post_compile_hook = None if tell is None else notify
