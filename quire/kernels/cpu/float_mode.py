"""How the calling thread computes with floats, which any library may have changed for it.

Invariant: kernels round to nearest and count numbers below the normal ones, on every thread, whoever calls them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.kernels.cpu import library


@contextmanager
def as_in_kernels() -> Iterator[None]:
    """Within, also what this thread computes besides kernels is so; afterwards it is as before."""
    loaded = library.loaded()
    if loaded is None:
        yield
        return
    before = loaded.take_float_mode()
    try:
        yield
    finally:
        loaded.set_float_mode(before)
