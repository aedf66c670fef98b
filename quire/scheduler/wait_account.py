# SPDX-License-Identifier: Apache-2.0
"""Account of why each request waits, or waited.

Invariant: no plan depends on it, and it does work only for requests whose cause changes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from operator import attrgetter

from quire.scheduler.explain import Cause, Explanation
from quire.scheduler.holds import Hold
from quire.scheduler.policies import Policy
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.step import BlockedRequest, StepPlan

NUM_REMEMBERED = 256  # Finished requests that can still be explained.


_number = attrgetter("number")


class WaitAccount:
    """Recorder of what each request waits for.

    The first queued request has a cause of its own, as have requests without an adapter slot; all others wait behind
    it or have been overtaken. A request is overtaken when one that arrived later starts while it is ready. It may have
    become ready late, so requests that are not overtaken are kept in order of arrival, not of queueing.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._queued: dict[Request, None] = {}  # since the last plan
        self._not_overtaken: list[Request] = []
        self._blocked: dict[Request, None] = {}
        self._capped: set[Request] = set()
        self._ended: OrderedDict[str, Explanation] = OrderedDict()

    def queue(self, request: Request, now: float) -> None:
        """Record that a request is ready; no step is planned before the running one has ended."""
        if request.status is RequestStatus.PREEMPTED:  # the cause stays, even after a hold
            request.wait.enter(Cause.PREEMPTED, now)
            return
        request.wait.enter(Cause.NEXT_STEP, now)
        self._queued[request] = None
        insort(self._not_overtaken, request, key=_number)

    def hold(self, request: Request, hold: Hold, now: float) -> None:
        """Record that a request is held."""
        request.wait.enter(hold.cause, now, hold.detail)

    def leave(self, request: Request) -> None:
        """Record that a request has left the queue without starting."""
        self._queued.pop(request, None)
        self._blocked.pop(request, None)
        if not self._is_overtaken(request):
            del self._not_overtaken[bisect_left(self._not_overtaken, request.number, key=_number)]

    def start(self, request: Request, now: float) -> None:
        """Record that a request starts; if for the first time, earlier ready requests have been overtaken."""
        request.wait.enter(None, now)
        if request.status is RequestStatus.PREEMPTED:
            return
        while self._not_overtaken and self._not_overtaken[0].number <= request.number:
            earlier = self._not_overtaken.pop(0)
            if earlier is not request:
                earlier.wait.enter(self._policy.overtaken, now)

    def preempt(self, request: Request, by: Request, now: float) -> None:
        """Record a preemption, by another request or for lack of blocks."""
        detail = by.request_id if by.tenant == request.tenant else "a request of another tenant"
        request.wait.enter(Cause.PREEMPTED, now, "lack of blocks" if by is request else detail)

    def pause(self, request: Request, now: float) -> None:
        """Record that the sleeping engine holds up a request."""
        request.wait.enter(Cause.ASLEEP, now)

    def preempt_for_sleep(self, request: Request, now: float) -> None:
        """Record a preemption by sleep, which remains the present cause."""
        request.wait.enter(Cause.PREEMPTED, now, "the engine's sleep")
        request.wait.enter(Cause.ASLEEP, now)

    def resume(self, request: Request, now: float) -> None:
        """Record that the engine is awake; the next plan refines the cause."""
        if request.status is RequestStatus.WAITING:
            request.wait.enter(Cause.NEXT_STEP, now)
            self._queued[request] = None
        else:
            request.wait.enter(Cause.PREEMPTED if request.status is RequestStatus.PREEMPTED else None, now)

    def plan(self, step: StepPlan, now: float) -> None:
        """Record, after planning a step, the blocked requests and the prompts that were capped."""
        for request in self._queued:
            self._fall_behind(request, now)
        self._queued.clear()
        blocked = [BlockedRequest(request, Cause.ADAPTER) for request in step.passed_over]
        if step.blocked is not None:
            blocked.append(step.blocked)
        before, self._blocked = self._blocked, dict.fromkeys(one.request for one in blocked)
        for request in before.keys() - self._blocked.keys():
            self._fall_behind(request, now)
        for request, cause, num_blocks in blocked:
            # PREEMPTED stays the cause of a preempted request.
            if request.status is RequestStatus.WAITING:
                request.wait.enter(cause, now, num_blocks)
        if self._capped or step.capped:
            self._note_capped(step, now)

    def finish(self, request: Request, now: float) -> None:
        """Record that a request has finished, and keep its explanation for a while."""
        request.wait.enter(None, now)
        self._capped.discard(request)
        self._ended[request.request_id] = _explanation(request, now)
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)

    def explain(self, request: Request, now: float) -> Explanation:
        """Explain an unfinished request."""
        waits = request.status is not RequestStatus.RUNNING
        ahead = enumerate(self._policy) if waits else ()
        return _explanation(request, now, next((n for n, other in ahead if other is request), 0))

    def explain_ended(self, request_id: str) -> Explanation | None:
        """Explain one of the last `NUM_REMEMBERED` finished requests."""
        return self._ended.get(request_id)

    def _is_overtaken(self, request: Request) -> bool:
        place = bisect_left(self._not_overtaken, request.number, key=_number)
        return not (place < len(self._not_overtaken) and self._not_overtaken[place] is request)

    def _fall_behind(self, request: Request, now: float) -> None:
        if request.status is RequestStatus.WAITING:
            overtaken = self._is_overtaken(request)
            request.wait.enter(self._policy.overtaken if overtaken else Cause.BEHIND, now)

    def _note_capped(self, step: StepPlan, now: float) -> None:
        """Record prompts that were capped; the cause ends when a step takes part of the prompt uncapped, or on
        preemption.
        """
        self._capped = {request for request in self._capped if request.wait.cause is Cause.LONG_PREFILL_CAP}
        for request in self._capped.intersection(chunk.request for chunk in step.chunks) - step.capped:
            request.wait.enter(None, now)
        for request in step.capped:
            request.wait.enter(Cause.LONG_PREFILL_CAP, now)
        self._capped |= step.capped


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
        tenant=request.tenant,
    )
