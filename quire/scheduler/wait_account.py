"""`WaitAccount`: tells every request's `WaitLog` what it waits for, as the scheduler goes along.

Invariant: it observes and never steers: nothing that is planned depends on what is written here. Work is done for
requests whose cause changes, never for all that wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from operator import attrgetter

from quire.scheduler.explain import Cause, Explanation
from quire.scheduler.holds import Hold
from quire.scheduler.policies import Policy
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.step import Blocked, StepPlan

NUM_REMEMBERED = 256
"""Requests that can still be explained after they ended, the last ones."""

_number = attrgetter("number")


class WaitAccount:
    """The first request in line has a cause of its own, as have those that lack a place for their adapter; the others
    wait behind it, or have been overtaken.

    A request is overtaken when one that came after it starts while it is ready itself. It may have become ready late,
    so those that are not overtaken are kept in the order of their arrival, not in that of their queueing.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._queued: dict[Request, None] = {}  # since the last plan
        self._not_overtaken: list[Request] = []
        self._blocked: dict[Request, None] = {}
        self._capped: set[Request] = set()
        self._ended: OrderedDict[str, Explanation] = OrderedDict()

    def queue(self, request: Request, now: float) -> None:
        """A request is ready; no step is planned before the running one has ended."""
        if request.status is RequestStatus.PREEMPTED:  # waits because of that, also after it was held
            request.wait.enter(Cause.PREEMPTED, now)
            return
        request.wait.enter(Cause.NEXT_STEP, now)
        self._queued[request] = None
        insort(self._not_overtaken, request, key=_number)

    def hold(self, request: Request, hold: Hold, now: float) -> None:
        """A request waits for something that it needs."""
        request.wait.enter(hold.cause, now, hold.detail)

    def leave(self, request: Request) -> None:
        """A request is not in line any more, and has not started."""
        self._queued.pop(request, None)
        self._blocked.pop(request, None)
        if not self._is_overtaken(request):
            del self._not_overtaken[bisect_left(self._not_overtaken, request.number, key=_number)]

    def start(self, request: Request, now: float) -> None:
        """A request runs from now on: if for the first time, earlier ones that are ready have been overtaken."""
        request.wait.enter(None, now)
        if request.status is RequestStatus.PREEMPTED:
            return
        while self._not_overtaken and self._not_overtaken[0].number <= request.number:
            earlier = self._not_overtaken.pop(0)
            if earlier is not request:
                earlier.wait.enter(self._policy.overtaken, now)

    def preempt(self, request: Request, by: Request, now: float) -> None:
        """A request has lost its place to another, or for want of blocks for itself."""
        detail = by.request_id if by.tenant == request.tenant else "a request of another tenant"
        request.wait.enter(Cause.PREEMPTED, now, "lack of blocks" if by is request else detail)

    def pause(self, request: Request, now: float) -> None:
        """The engine sleeps; that holds up a request, wherever it was."""
        request.wait.enter(Cause.ASLEEP, now)

    def preempt_for_sleep(self, request: Request, now: float) -> None:
        """A request has lost its place while the engine sleeps, which first of all holds it up."""
        request.wait.enter(Cause.PREEMPTED, now, "the engine's sleep")
        request.wait.enter(Cause.ASLEEP, now)

    def resume(self, request: Request, now: float) -> None:
        """The engine is awake; the next plan says more."""
        if request.status is RequestStatus.WAITING:
            request.wait.enter(Cause.NEXT_STEP, now)
            self._queued[request] = None
        else:
            request.wait.enter(Cause.PREEMPTED if request.status is RequestStatus.PREEMPTED else None, now)

    def plan(self, step: StepPlan, now: float) -> None:
        """A step was planned: what keeps the first requests in line from being in it, and which prompts were cut."""
        for request in self._queued:
            self._fall_behind(request, now)
        self._queued.clear()
        blocked = [Blocked(request, Cause.ADAPTER) for request in step.passed_over]
        if step.blocked is not None:
            blocked.append(step.blocked)
        before, self._blocked = self._blocked, dict.fromkeys(one.request for one in blocked)
        for request in before.keys() - self._blocked.keys():
            self._fall_behind(request, now)
        for request, cause, num_blocks in blocked:
            # A preempted request waits because of that, whatever it lacks now.
            if request.status is RequestStatus.WAITING:
                request.wait.enter(cause, now, num_blocks)
        if self._capped or step.capped:
            self._note_capped(step, now)

    def end(self, request: Request, now: float) -> None:
        """A request has ended; what held it up is remembered for a while."""
        request.wait.enter(None, now)
        self._capped.discard(request)
        self._ended[request.request_id] = _explanation(request, now)
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)

    def explain(self, request: Request, now: float) -> Explanation:
        """Of a request that has not ended."""
        waits = request.status is not RequestStatus.RUNNING
        ahead = enumerate(self._policy) if waits else ()
        return _explanation(request, now, next((n for n, other in ahead if other is request), 0))

    def explain_ended(self, request_id: str) -> Explanation | None:
        """Of one of the last `NUM_REMEMBERED` requests that ended."""
        return self._ended.get(request_id)

    def _is_overtaken(self, request: Request) -> bool:
        place = bisect_left(self._not_overtaken, request.number, key=_number)
        return not (place < len(self._not_overtaken) and self._not_overtaken[place] is request)

    def _fall_behind(self, request: Request, now: float) -> None:
        if request.status is RequestStatus.WAITING:
            overtaken = self._is_overtaken(request)
            request.wait.enter(self._policy.overtaken if overtaken else Cause.BEHIND, now)

    def _note_capped(self, step: StepPlan, now: float) -> None:
        """A prompt that was cut waits for the rest until a step takes some of it uncut, or it is preempted."""
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
