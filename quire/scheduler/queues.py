"""Queues of waiting requests; a policy is the order in which a queue gives them out.

Invariant: a queue holds each request once, and taking one out by name costs no more than taking the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from quire.scheduler.request import Request


class RequestQueue(ABC):
    """Waiting and preempted requests, iterated in the order in which they will start."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Take in a new request."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """Take back a preempted request; it goes before every request that never ran."""

    @abstractmethod
    def peek(self) -> Request:
        """The request that starts next; the queue must not be empty."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take out a request from wherever it stands."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue(RequestQueue):
    """First come, first served.

    Preemption takes the youngest running request first, so putting each one in front keeps the order.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


QUEUES: dict[str, type[RequestQueue]] = {"fcfs": FCFSQueue}
"""`--scheduling-policy` -> queue."""
