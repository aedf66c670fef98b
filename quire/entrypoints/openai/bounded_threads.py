"""`BoundedThreads`: foreign code that may never end, off the event loop.

Invariant: nobody waits for it longer than its limit, neither its caller nor the end of the process. What runs on is
interrupted at its next bytecode, so that a loop of a chat template does end.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 8
LIMIT_S = 30.0


class TimeIsUpError(BaseException):
    """Raised in a thread in the middle of whatever it does; foreign code that catches every `Exception` lets it by."""


class BoundedThreads:
    """Runs functions in threads of their own, so many at a time, each for `limit_s` seconds at most.

    `asyncio.to_thread` would not do: its threads are waited for at the end of the loop and of the process.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._free = asyncio.Semaphore(MAX_THREADS)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result, or what it raises.

        Raises:
            TimeoutError: it takes longer than the limit, counted from when it began.
        """
        async with self._free:
            result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            work = _Work(result, lambda: function(*args, **kwargs))
            try:
                # Not `wait_for`, which in Python 3.11 forgets a cancellation that comes with the result.
                async with asyncio.timeout(self.limit_s):
                    return await result
            finally:
                work.interrupt()


class _Work:
    """A thread that puts a function's result into a future, unless it was interrupted before."""

    def __init__(self, result: asyncio.Future[T], function: Callable[[], T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._over = False
        self._thread = threading.Thread(
            target=self._run, args=(result, function), name="quire-bounded", daemon=True
        )
        self._thread.start()

    def interrupt(self) -> None:
        """Nobody waits any more; nothing happens if the function has returned."""
        with self._lock:
            if not self._over and self._thread.ident is not None:
                number, error = ctypes.c_ulong(self._thread.ident), ctypes.py_object(TimeIsUpError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)

    def _run(self, result: asyncio.Future[T], function: Callable[[], T]) -> None:
        try:
            try:
                value = function()
            except Exception as error:
                self._hand_over(result, result.set_exception, error)
            else:
                self._hand_over(result, result.set_result, value)
        except (TimeIsUpError, RuntimeError):  # interrupted; or the loop has been closed meanwhile
            return

    def _hand_over(self, result: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
        with self._lock:
            self._over = True
        self._loop.call_soon_threadsafe(_settle, result, settle, value)


def _settle(result: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    """Runs in the loop; by then nobody may wait any more."""
    if not result.done():
        settle(value)
