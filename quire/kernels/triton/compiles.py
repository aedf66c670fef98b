"""When kernels are compiled: before the first step, or somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable

from triton import knobs


def watch(tell: Callable[[str], None] | None) -> None:
    """Have the name of every kernel told that is compiled, or loaded from Triton's cache, from now on; None: no more.

    There is one watcher in a process.
    """

    def told(*, fn: object, **_facts: object) -> None:
        assert tell is not None
        tell(getattr(fn, "name", str(fn)))

    knobs.runtime.jit_post_compile_hook = None if tell is None else told
