"""`BoundedThreads`: foreign code that may never end, off the event loop.

Invariant: nobody waits for it longer than its limit, neither its caller nor the end of the process. What runs on is
interrupted at its next bytecode, so that a loop of a chat template does end, and its thread with it. Other threads are
kept for what comes next: the event loop would have to wait until a new one has started.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 8
LIMIT_S = 30.0
AGAIN_S = 0.5
"""From one interruption to the next: one that comes while Python finalizes an object is lost."""


class TimeIsUpError(BaseException):
    """Raised in a thread in the middle of whatever it does; foreign code that catches every `Exception` lets it by."""


class BoundedThreads:
    """Runs functions in threads of their own, so many at a time, each for `limit_s` seconds at most.

    `asyncio.to_thread` would not do: its threads are waited for at the end of the loop and of the process.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._free = asyncio.Semaphore(MAX_THREADS)
        self._idle: list[_Worker] = []
        weakref.finalize(self, _dismiss, self._idle)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result, or what it raises.

        Raises:
            TimeoutError: it takes longer than the limit, counted from when it began.
        """
        async with self._free:
            result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            worker = self._idle.pop() if self._idle else _Worker()
            worker.begin(result, lambda: function(*args, **kwargs))
            try:
                # Not `wait_for`, which in Python 3.11 forgets a cancellation that comes with the result.
                async with asyncio.timeout(self.limit_s):
                    return await result
            finally:
                if worker.interrupt():
                    self._idle.append(worker)


def _dismiss(workers: list[_Worker]) -> None:
    """Nobody will give them work any more."""
    for worker in workers:
        worker.end()


class _Worker:
    """A thread that puts functions' results into futures, one at a time, until it is interrupted.

    An idle one has no reference to the event loop, whose signal handlers refer to the owner of all threads: that one
    could never be collected, and so the thread would never end.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._works = False
        self._work: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-bounded", daemon=True)

    def begin(self, result: asyncio.Future[T], function: Callable[[], T]) -> None:
        """Work on this; what came before has returned."""
        self._loop = result.get_loop()
        self._works = True
        self._work.put((result, function))
        if self._thread.ident is None:
            self._thread.start()

    def interrupt(self) -> bool:
        """Nobody waits any more. True, and nothing done, if the function has returned; else the thread ends."""
        with self._lock:
            if self._works and self._thread.is_alive() and self._loop is not None:
                number, error = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(TimeIsUpError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
                self._loop.call_later(AGAIN_S, self.interrupt)
            return not self._works

    def end(self) -> None:
        """Let the thread end once it is idle."""
        self._work.put(None)

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        except (TimeIsUpError, RuntimeError):  # interrupted; or the loop has been closed meanwhile
            return

    def _do_next(self) -> bool:
        """False at the end. A frame of its own, so that an idle thread keeps nothing of a request."""
        work = self._work.get()
        if work is not None:
            self._do(*work)
        return work is not None

    def _do(self, result: asyncio.Future[T], function: Callable[[], T]) -> None:
        try:
            value = function()
        except Exception as error:
            self._hand_over(result, result.set_exception, error)
        else:
            self._hand_over(result, result.set_result, value)

    def _hand_over(self, result: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
        with self._lock:
            self._works = False
            loop, self._loop = self._loop, None
        assert loop is not None, "`begin` has set it"
        loop.call_soon_threadsafe(_settle, result, settle, value)


def _settle(result: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    """Runs in the loop; by then nobody may wait any more."""
    if not result.done():
        settle(value)
