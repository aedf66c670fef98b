# SPDX-License-Identifier: Apache-2.0
"""Notification of kernel compilations, which should happen before the first step."""

from __future__ import annotations

from collections.abc import Callable

from triton import knobs


def watch(tell: Callable[[str], None] | None) -> None:
    """Call `tell` with the name of every kernel that is compiled, or loaded from Triton's cache, from now on; None:
    stop.

    A process has one watcher.
    """

    def notify(*, fn: object, **_facts: object) -> None:
        assert tell is not None
        tell(getattr(fn, "name", str(fn)))

    knobs.runtime.jit_post_compile_hook = None if tell is None else notify
