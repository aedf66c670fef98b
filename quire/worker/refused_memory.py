"""Memory that the machine refuses while an engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import StartupError

_TRIED = "you tried to allocate"
"""What torch says then in a RuntimeError, on a CPU."""


@contextmanager
def refused_memory(purpose: str, remedy: str) -> Iterator[None]:
    """Make a sentence for the operator of it; any other error passes.

    Raises:
        StartupError: what the memory was for, how much it was, and which flags ask for less.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = str(error)
        if isinstance(error, RuntimeError) and _TRIED not in reason:
            raise
        tried = reason[reason.index(_TRIED) :].split(".")[0] if _TRIED in reason else "Python got none"
        raise StartupError(f"the machine refuses memory for {purpose} ({tried}); {remedy}") from error
