# SPDX-License-Identifier: Apache-2.0
"""Queues of unfinished requests, retained requests, and the accounting of waiting.

`RequestQueues`: every unfinished request is in one place, which its status names. RUNNING requests hold blocks and a
worker row; all others wait, in the policy's queue if they are ready, else held. Each transition is one method here,
which updates the policy, the wait accounting and the KV cache in the right order.

`RetainedRequests`: finished requests whose blocks stay for forks, as beam search needs: each of its steps finishes all
beams and starts others as their forks. Invariant: retained blocks are freed first when blocks are short; a fork that
comes too late computes again what it would have shared. A retained request is dropped once it is closed and has no
waiting fork.

`WaitAccount`: records what each request waits for. Invariant: no plan depends on it, and it does work only for
requests whose cause changes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from operator import attrgetter
from types import MappingProxyType

from quire.kv_cache.manager import IntegrityError, KVCacheManager, PrefixHit
from quire.scheduler.explain import Cause, Explanation
from quire.scheduler.holds import HeldRequests, Hold, HoldKey
from quire.scheduler.policies import Policy, RankedRequests
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.step import Blocked, StepPlan


class RetainedRequests:
    """Finished requests that are retained for forks."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._retained: dict[str, Request] = {}
        self._waiting: dict[str, set[Request]] = {}
        self._closed: set[str] = set()
        self._with_blocks: dict[str, Request] = {}

    def retain(self, request: Request) -> None:
        """Retain a finished request and its blocks."""
        self._retained[request.request_id] = self._with_blocks[request.request_id] = request
        self._waiting[request.request_id] = set()

    def get(self, request_id: str) -> Request | None:
        """Return the retained request with this id."""
        return self._retained.get(request_id)

    def has_blocks(self, request: Request) -> bool:
        """Return whether forks of a request can still share its blocks."""
        return self._with_blocks.get(request.request_id) is request

    @property
    def holders(self) -> set[str]:
        """Ids of retained requests that hold blocks."""
        return set(self._with_blocks)

    def register_fork(self, fork: Request, parent: Request) -> None:
        """Register a fork of a retained request."""
        self._waiting[parent.request_id].add(fork)

    def unregister_fork(self, fork: Request) -> None:
        """Unregister a fork that has started or finished, and so no longer needs its parent."""
        if fork.parent is None or self._retained.get(fork.parent.request_id) is not fork.parent:
            return
        self._waiting[fork.parent.request_id].discard(fork)
        self._forget_unused(fork.parent.request_id)

    def close(self, request_id: str) -> None:
        """Accept no more forks of this request; unknown ids are ignored."""
        if request_id in self._retained:
            self._closed.add(request_id)
            self._forget_unused(request_id)

    def free_blocks(self) -> bool:
        """Free the blocks of all retained requests; False if there were none."""
        dropped, self._with_blocks = self._with_blocks, {}
        for request in dropped.values():
            self._kv.free(request)
        return bool(dropped)

    def _forget_unused(self, request_id: str) -> None:
        if request_id not in self._closed or self._waiting[request_id]:
            return
        self._closed.discard(request_id)
        del self._retained[request_id], self._waiting[request_id]
        request = self._with_blocks.pop(request_id, None)
        if request is not None:
            self._kv.free(request)


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
        blocked = [Blocked(request, Cause.ADAPTER) for request in step.passed_over]
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


class RequestQueues:
    """Owner of the unfinished requests.

    Attributes:
        running: in order of rank, which is the order of planning. Preemption takes from its end, so a request that is
            in a plan never loses its place there.
        policy: ranks all requests and queues the ready ones; changed only by the methods below.
        by_id: all unfinished requests; read-only.
        retained: finished requests retained for forks.
        num_preemptions: total.
    """

    def __init__(self, policy: Policy, kv: KVCacheManager) -> None:
        self._requests: dict[str, Request] = {}
        self.by_id: Mapping[str, Request] = MappingProxyType(self._requests)
        self.running = RankedRequests()
        self.policy = policy
        self.num_preemptions = 0
        self._kv = kv
        self._held = HeldRequests()
        self.retained = RetainedRequests(kv)
        self._waits = WaitAccount(policy)
        self._vacated: list[str] = []
        self._num_arrived = 0

    # Transitions

    def arrive(self, request: Request, now: float, holds: Iterable[Hold] = ()) -> None:
        """Add a new request, which is ready once all its holds are released."""
        self._number(request, now)
        self._requests[request.request_id] = request
        self.policy.arrive(request)
        for hold in holds:
            self._held.add(request, hold)
        self._enqueue(request, now)

    def _number(self, request: Request, now: float) -> None:
        """Assign the order of arrival: a beam search has one number per beam, which successors take over."""
        parent = request.parent
        if parent is not None and self.retained.get(parent.request_id) is parent:
            request.queued_ts, request.number = parent.queued_ts, parent.number - parent.beam + request.beam
            self.retained.register_fork(request, parent)
        else:
            request.queued_ts, request.number = now, self._num_arrived + 1 + request.beam
            self._num_arrived += max(request.num_beams, 1)

    def start(self, request: Request, hit: PrefixHit, now: float) -> None:
        """Run a ready request on the blocks of a hit."""
        is_resumed = request.status is RequestStatus.PREEMPTED
        self.policy.start(request, hit.num_tokens)
        self._waits.start(request, now)
        self.running.add(request)
        request.start(now, hit.num_tokens)
        self._kv.start(request, hit, is_resumed=is_resumed)
        self.retained.unregister_fork(request)

    def preempt_last(self, by: Request, now: float) -> None:
        """Preempt the last running request; it keeps its tokens, to be computed again.

        With swapped-out blocks it resumes where it was. A request that must recompute all its tokens is not swapped.
        """
        victim = self.running.last
        self._vacate(victim)
        if victim.recomputes:
            self._kv.free(victim)
        else:
            self._kv.preempt(victim)
        victim.preempt()
        self._waits.preempt(victim, by, now)
        self.policy.add(victim)
        self.num_preemptions += 1

    def preempt_all(self, now: float) -> None:
        """Free the blocks of all requests on both tiers; they keep their tokens, to be computed again."""
        for request in reversed(list(self.running)):
            self._preempt_for_sleep(request, now)
        self.retained.free_blocks()
        for request in self._requests.values():
            self._kv.free(request)

    def renew_rows(self, now: float) -> None:
        """Take the rows of all running requests, which keep their blocks and get other rows with their next chunks.

        Requests whose blocks would be of no use are preempted; retained requests lose their blocks.
        """
        for request in reversed(list(self.running)):
            if request.recomputes:
                self._preempt_for_sleep(request, now)
                self._kv.free(request)
            else:
                self._kv.trim(request)  # a new row has none but the blocks that it reads
                self._leave_row(request)
        self.retained.free_blocks()

    def _preempt_for_sleep(self, request: Request, now: float) -> None:
        self._vacate(request)
        request.preempt()
        self._waits.preempt_for_sleep(request, now)
        self.policy.add(request)
        self.num_preemptions += 1

    def finish(self, request: Request, reason: str, now: float, *, keeps: bool = False) -> None:
        """Finish a request from any place and release or retain all that it holds; the only way out."""
        status = request.status
        if not request.finish(reason):
            return
        if status is RequestStatus.RUNNING:
            self._vacate(request)
        elif not self._held.discard(request):
            self._leave_line(request)
        self.policy.finish(request)
        self.release(request, now)
        del self._requests[request.request_id]
        self._waits.finish(request, now)
        self.retained.unregister_fork(request)
        if keeps:
            self.retained.retain(request)
        else:
            self._kv.free(request)

    def hold(self, request: Request, hold: Hold, now: float) -> None:
        """Add a hold to a request that does not run."""
        assert request.status is not RequestStatus.RUNNING, f"{request!r} is running and cannot be held"
        if request not in self._held:
            self._leave_line(request)
        self._held.add(request, hold)
        self._enqueue(request, now)

    def release(self, key: HoldKey, now: float) -> None:
        """Release a key; requests without further holds are queued at the place of their rank."""
        for request in self._held.release(key):
            self._enqueue(request, now)

    def _enqueue(self, request: Request, now: float) -> None:
        """Queue the request, or record its first hold."""
        hold = self._held.first_hold(request)
        if hold is None:
            self.policy.add(request)
            self._waits.queue(request, now)
        else:
            self._waits.hold(request, hold, now)

    def _leave_line(self, request: Request) -> None:
        self.policy.remove(request)
        self._waits.leave(request)

    def _vacate(self, request: Request) -> None:
        self.running.remove(request)
        self.policy.vacate(request)
        self._leave_row(request)

    def _leave_row(self, request: Request) -> None:
        """Let the next plan tell the worker to free the request's row, if it has one."""
        if request.has_row:
            self._vacated.append(request.request_id)
            request.has_row = False

    # The step

    def note(self, step: StepPlan, now: float) -> None:
        """Charge a planned step to the policy and record what waiting requests wait for."""
        self.policy.charge(step.chunks)
        self._waits.plan(step, now)

    def pause(self, now: float) -> None:
        """Record that no step is planned for a while, for all requests that are not held."""
        for request in (*self.running, *self.policy):
            self._waits.pause(request, now)

    def resume(self, now: float) -> None:
        """Record that steps are planned again."""
        for request in (*self.running, *self.policy):
            self._waits.resume(request, now)

    def pop_vacated_ids(self) -> list[str]:
        """Return ids of requests that lost their rows since the last call, for the plan that informs the worker."""
        vacated, self._vacated = self._vacated, []
        return vacated

    # State

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, queued or held."""
        return len(self.policy) + len(self._held)

    @property
    def num_held(self) -> int:
        """Requests that are held."""
        return len(self._held)

    @property
    def has_work(self) -> bool:
        """True if a step would compute or free something; held requests do not count."""
        return len(self.running) > 0 or len(self.policy) > 0 or bool(self._vacated)

    @property
    def has_vacated(self) -> bool:
        """True if the worker has rows to free."""
        return bool(self._vacated)

    def in_order(self, limit: int) -> list[Request]:
        """Return up to `limit` requests: running, ready in order of service, held."""
        return list(islice(chain(self.running, self.policy, self._held), limit))

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Explain why a request waits or waited; None if it is unknown or finished too long ago."""
        request = self._requests.get(request_id)
        return self._waits.explain_ended(request_id) if request is None else self._waits.explain(request, now)

    def check_integrity(self) -> None:
        """Check that queues, request states and block holders agree.

        Raises:
            IntegrityError: internal bug; holds the state.
        """
        running = [request.request_id for request in self.running]
        waiting = [request.request_id for request in (*self.policy, *self._held)]
        state = {"requests": self._requests, "running": running, "waiting": waiting}
        if sorted([*running, *waiting]) != sorted(self._requests) or len(waiting) != self.num_waiting:
            raise IntegrityError("a request is in no queue, or in two", state)
        expected = {
            request.request_id
            for request in self._requests.values()
            if request.status is RequestStatus.RUNNING
        }
        if expected != set(running) or expected | self.retained.holders != self._kv.holders():
            raise IntegrityError("running requests and holders of blocks differ", state)
        if not self._kv.swapped() <= self._requests.keys() - running:
            raise IntegrityError("a swapped request is running or unknown", state)
