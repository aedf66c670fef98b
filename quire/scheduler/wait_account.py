"""`WaitAccount`: tells every request's `WaitLog` what it waits for, as the scheduler goes along.

Invariant: work is done for requests whose cause changes, never for all that wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from quire.scheduler.explain import Cause, Explanation
from quire.scheduler.policies import Policy
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.step import Blocked

NUM_REMEMBERED = 256
"""Requests that can still be explained after they ended, the last ones."""


class WaitAccount:
    """The first waiting request has a cause of its own; the others wait behind it, or have been overtaken."""

    def __init__(self, overtaken: Cause) -> None:
        self._overtaken = overtaken
        self._arrived: list[Request] = []
        self._not_overtaken: deque[Request] = deque()
        self._last_started = 0
        self._blocked: Request | None = None
        self._ended: OrderedDict[str, Explanation] = OrderedDict()

    def arrive(self, request: Request, now: float) -> None:
        """A request was queued; no step is planned before the running one has ended."""
        request.wait.enter(Cause.NEXT_STEP, now)
        self._arrived.append(request)
        self._not_overtaken.append(request)

    def start(self, request: Request, now: float) -> None:
        """A request starts for the first time: earlier ones that still wait have been overtaken."""
        self._last_started = max(self._last_started, request.number)
        while self._not_overtaken and self._not_overtaken[0].number <= self._last_started:
            earlier = self._not_overtaken.popleft()
            if earlier is not request and earlier.status is RequestStatus.WAITING:
                earlier.wait.enter(self._overtaken, now)

    def plan(self, blocked: Blocked | None, now: float) -> None:
        """A step was planned, and this is what keeps the first waiting request from being in it."""
        for request in self._arrived:
            self._fall_behind(request, now)
        self._arrived.clear()
        first = None if blocked is None else blocked.request
        if self._blocked is not None and self._blocked is not first:
            self._fall_behind(self._blocked, now)
        self._blocked = first
        # A preempted request waits because of that, whatever it lacks now.
        if blocked is not None and blocked.request.status is RequestStatus.WAITING:
            blocked.request.wait.enter(blocked.cause, now, blocked.num_blocks)

    def end(self, request: Request, now: float) -> None:
        """A request has ended; what held it up is remembered for a while."""
        request.wait.enter(None, now)
        self._ended[request.request_id] = _explanation(request, now)
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)

    def explain(self, request: Request, policy: Policy, now: float) -> Explanation:
        """Of a request that has not ended."""
        waits = request.status is not RequestStatus.RUNNING
        num_ahead = next((n for n, other in enumerate(policy) if other is request), 0) if waits else 0
        return _explanation(request, now, num_ahead)

    def explain_ended(self, request_id: str) -> Explanation | None:
        """Of one of the last `NUM_REMEMBERED` requests that ended."""
        return self._ended.get(request_id)

    def _fall_behind(self, request: Request, now: float) -> None:
        if request.status is RequestStatus.WAITING:
            overtaken = request.number < self._last_started
            request.wait.enter(self._overtaken if overtaken else Cause.BEHIND, now)


def _explanation(request: Request, now: float, num_ahead: int = 0) -> Explanation:
    shares = request.wait.shares(now)
    return Explanation(
        request_id=request.request_id,
        status=request.status.name.lower(),
        waited_ns=sum(share.duration_ns for share in shares),
        shares=shares,
        cause=request.wait.cause.name.lower() if request.wait.cause else None,
        num_ahead=num_ahead,
        num_preemptions=request.num_preemptions,
    )
