"""Where an executor's calls run: in the caller's thread, or in order on a thread of their own.

Invariant: calls run one at a time in the order in which they were started, and none runs after one has failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


class Lane(ABC):
    """Runs calls in order, until one fails."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None

    @abstractmethod
    def start(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """Begin a call; returns what waits for its result, or raises what it, or one before it, raised."""

    def close(self) -> None:
        """Wait for what was started; calling it twice is fine."""
        return None

    def _run(self, call: Callable[[], Result]) -> Result:
        if self._failure is not None:
            raise self._failure
        try:
            return call()
        except BaseException as failure:
            self._failure = failure
            raise


class CallerLane(Lane):
    """A call runs when its result is asked for: nothing is begun early, and nothing changes threads."""

    def start(self, call: Callable[[], Result]) -> Callable[[], Result]:
        return partial(self._run, call)


class EagerLane(Lane):
    """A call runs at once in the caller's thread, for calls that only hand work to a device."""

    def start(self, call: Callable[[], Result]) -> Callable[[], Result]:
        future: Future[Result] = Future()
        try:
            future.set_result(self._run(call))
        except Exception as failure:
            future.set_exception(failure)
        return future.result


class ThreadLane(Lane):
    """A call runs as soon as the ones before it have ended, while the caller goes on.

    Everything that computes must use the same thread: torch keeps its threads, and their number, for each thread apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-worker")

    def start(self, call: Callable[[], Result]) -> Callable[[], Result]:
        return self._thread.submit(self._run, call).result

    def close(self) -> None:
        self._thread.shutdown()
