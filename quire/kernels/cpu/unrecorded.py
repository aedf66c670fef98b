"""What keeps a model's steps off tapes, found before the first request is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.kernels.cpu.tape import may_be_recorded
from quire.kernels.dispatch_mode import DispatchMode


class UnrecordedOps(DispatchMode):
    """While active: the first of torch's operations that no tape can hold.

    Attributes:
        first: its name; None: there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.first is None and not may_be_recorded(func, args):
            self.first = str(func)
        return func(*args, **(kwargs or {}))
