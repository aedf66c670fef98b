"""`RequestQueues`: the place of every request that has not ended.

Invariant: a request is in one place, which its status names: RUNNING requests hold blocks and a row of the worker; all
others wait, in the policy's line if they are ready, else held. Each way from one place to another is one verb here,
which tells the policy, the record of waiting and the KV cache in the one order that is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from quire.kv_cache.manager import IntegrityError, KVCacheManager, PrefixHit
from quire.scheduler.explain import Explanation
from quire.scheduler.holds import HeldRequests, Hold, HoldKey
from quire.scheduler.kept import KeptRequests
from quire.scheduler.policies import Policy, RankedRequests
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.step import StepPlan
from quire.scheduler.wait_account import WaitAccount


class RequestQueues:
    """Owns the unfinished requests.

    Attributes:
        running: in the order of their ranks. That is also the order of planning, and preemption takes from its end, so
            a request that has its place in a plan never loses it again.
        policy: ranks all, and has those that are ready in line; to be changed by the verbs only.
        by_id: all of them, wherever they are; read-only.
        kept: those that ended, and whose blocks stay for forks.
        num_preemptions: how often a request lost its row before its end.
    """

    def __init__(self, policy: Policy, kv: KVCacheManager) -> None:
        self._requests: dict[str, Request] = {}
        self.by_id: Mapping[str, Request] = MappingProxyType(self._requests)
        self.running = RankedRequests()
        self.policy = policy
        self.num_preemptions = 0
        self._kv = kv
        self._held = HeldRequests()
        self.kept = KeptRequests(kv)
        self._waits = WaitAccount(policy)
        self._vacated: list[str] = []
        self._num_arrived = 0

    # From place to place

    def arrive(self, request: Request, now: float, holds: Iterable[Hold] = ()) -> None:
        """Take in a new request, which is ready once all its holds are released."""
        self._number(request, now)
        self._requests[request.request_id] = request
        self.policy.arrive(request)
        for hold in holds:
            self._held.add(request, hold)
        self._let_wait(request, now)

    def _number(self, request: Request, now: float) -> None:
        """The place in the order of arrival: a search has one for each beam, which those that follow it take over."""
        parent = request.parent
        if parent is not None and self.kept.get(parent.request_id) is parent:
            request.queued_ts, request.number = parent.queued_ts, parent.number - parent.beam + request.beam
            self.kept.expect(request, parent)
        else:
            request.queued_ts, request.number = now, self._num_arrived + 1 + request.beam
            self._num_arrived += max(request.num_beams, 1)

    def start(self, request: Request, hit: PrefixHit, now: float) -> None:
        """Let a request that is ready run, on the blocks of a hit."""
        is_resumed = request.status is RequestStatus.PREEMPTED
        self.policy.start(request, hit.num_tokens)
        self._waits.start(request, now)
        self.running.add(request)
        request.start(now, hit.num_tokens)
        self._kv.start(request, hit, is_resumed=is_resumed)
        self.kept.settle(request)

    def preempt_last(self, by: Request, now: float) -> None:
        """Take the blocks of the running request of highest rank; it keeps its tokens, to be computed again.

        If its blocks are swapped out, it returns as it was; one that must compute its tokens again has no use for that.
        """
        victim = self.running.last
        self._vacate(victim)
        if victim.starts_over or victim.sampling_params.has_sampler_state:
            self._kv.free(victim)
        else:
            self._kv.preempt(victim)
        victim.preempt()
        self._waits.preempt(victim, by, now)
        self.policy.add(victim)
        self.num_preemptions += 1

    def preempt_all(self, now: float) -> None:
        """Take the blocks of all requests, on both tiers; they keep their tokens, to be computed again."""
        for request in reversed(list(self.running)):
            self._vacate(request)
            request.preempt()
            self._waits.preempt_for_sleep(request, now)
            self.policy.add(request)
            self.num_preemptions += 1
        self.kept.drop_blocks()
        for request in self._requests.values():
            self._kv.free(request)

    def finish(self, request: Request, reason: str, now: float, *, keeps: bool = False) -> None:
        """The one way out: whatever the reason and the place, all that the request holds is released, or kept."""
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
        self._waits.end(request, now)
        self.kept.settle(request)
        if keeps:
            self.kept.keep(request)
        else:
            self._kv.free(request)

    def hold(self, request: Request, hold: Hold, now: float) -> None:
        """Let a request that does not run wait for one thing more."""
        assert request.status is not RequestStatus.RUNNING, f"{request!r} is beyond holding"
        if request not in self._held:
            self._leave_line(request)
        self._held.add(request, hold)
        self._let_wait(request, now)

    def release(self, key: HoldKey, now: float) -> None:
        """What holds with this key waited for is there; who lacks nothing more is ready, at the place of its rank."""
        for request in self._held.release(key):
            self._let_wait(request, now)

    def _let_wait(self, request: Request, now: float) -> None:
        """In line, or for the first thing that it lacks."""
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
        self._vacated.append(request.request_id)

    # The step

    def note(self, step: StepPlan, now: float) -> None:
        """A step was planned: the policy takes account of what it computes, and those who wait learn why."""
        self.policy.charge(step.chunks)
        self._waits.plan(step, now)

    def pause(self, now: float) -> None:
        """No step will be planned for a while, so that alone holds up all that is not held."""
        for request in (*self.running, *self.policy):
            self._waits.pause(request, now)

    def resume(self, now: float) -> None:
        """Steps are planned again."""
        for request in (*self.running, *self.policy):
            self._waits.resume(request, now)

    def take_vacated(self) -> list[str]:
        """Ids of requests that lost their rows since the last call, for the plan that tells the worker."""
        vacated, self._vacated = self._vacated, []
        return vacated

    # Questions

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, ready or held."""
        return len(self.policy) + len(self._held)

    @property
    def num_held(self) -> int:
        """Requests that are not ready."""
        return len(self._held)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or free something; it does nothing for those that are held."""
        return len(self.running) > 0 or len(self.policy) > 0 or bool(self._vacated)

    @property
    def has_vacated(self) -> bool:
        """Whether the worker has rows to free."""
        return bool(self._vacated)

    def explain(self, request_id: str, now: float) -> Explanation | None:
        """Why a request waits or waited; None if it is unknown or ended too long ago."""
        request = self._requests.get(request_id)
        return self._waits.explain_ended(request_id) if request is None else self._waits.explain(request, now)

    def check_integrity(self) -> None:
        """Check that the places agree with the requests, and with who holds blocks.

        Raises:
            IntegrityError: a bug of ours; holds the state.
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
        if expected != set(running) or expected | self.kept.holders != self._kv.holders():
            raise IntegrityError("running requests and holders of blocks differ", state)
        if not self._kv.swapped() <= self._requests.keys() - running:
            raise IntegrityError("a swapped request is running or unknown", state)
