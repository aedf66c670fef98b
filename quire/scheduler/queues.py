# SPDX-License-Identifier: Apache-2.0
"""Queues of unfinished requests.

Every unfinished request is in one place, which its status names. RUNNING requests hold blocks and a
worker row; all others wait, in the policy's queue if they are ready, else held. Each transition is one method here,
which updates the policy, the wait accounting and the KV cache in the right order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, islice
from types import MappingProxyType

from quire.kv_cache.manager import IntegrityError, KVCacheManager, PrefixHit
from quire.scheduler.explain import Explanation
from quire.scheduler.holds import HeldRequests, Hold, HoldKey
from quire.scheduler.policies import Policy, RankedRequests
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.step import StepPlan
from quire.scheduler.wait_account import WaitAccount


class RequestQueues:
    """Owner of the unfinished requests.

    Attributes:
        running: in order of rank, which is the order of planning. Preemption takes from its end, so a request that is
            in a plan never loses its place there.
        policy: ranks all requests and queues the ready ones; changed only by the methods below.
        by_id: all unfinished requests; read-only.
        num_rows: worker rows that running requests take, or may take as their searches go on.
        num_preemptions: total.
    """

    def __init__(self, policy: Policy, kv: KVCacheManager) -> None:
        self._requests: dict[str, Request] = {}
        self.by_id: Mapping[str, Request] = MappingProxyType(self._requests)
        self.running = RankedRequests()
        self.policy = policy
        self.num_rows = 0
        self.num_preemptions = 0
        self._kv = kv
        self._held = HeldRequests()
        self._waits = WaitAccount(policy)
        self._vacated: list[str] = []
        self._num_arrived = 0

    # Transitions

    def arrive(self, request: Request, now: float, holds: Iterable[Hold] = ()) -> None:
        """Add a new request, which is ready once all its holds are released."""
        self._num_arrived += 1
        request.queued_ts, request.number = now, self._num_arrived
        self._requests[request.request_id] = request
        self.policy.arrive(request)
        for hold in holds:
            self._held.add(request, hold)
        self._enqueue(request, now)

    def start(self, request: Request, hit: PrefixHit, now: float) -> None:
        """Run a ready request on the blocks of a hit."""
        is_resumed = request.status is RequestStatus.PREEMPTED
        self.policy.start(request, hit.num_tokens)
        self._waits.start(request, now)
        self.running.add(request)
        self.num_rows += request.num_rows
        request.start(now, hit.num_tokens)
        self._kv.start(request, hit, is_resumed=is_resumed)

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
        for request in self._requests.values():
            self._kv.free(request)

    def renew_rows(self, now: float) -> None:
        """Take the rows of all running requests, which keep their blocks and get other rows with their next chunks.

        Requests whose blocks would be of no use are preempted.
        """
        for request in reversed(list(self.running)):
            if request.recomputes:
                self._preempt_for_sleep(request, now)
                self._kv.free(request)
            else:
                self._kv.trim(request)  # a new row has none but the blocks that it reads
                self._leave_row(request)

    def _preempt_for_sleep(self, request: Request, now: float) -> None:
        self._vacate(request)
        request.preempt()
        self._waits.preempt_for_sleep(request, now)
        self.policy.add(request)
        self.num_preemptions += 1

    def finish(self, request: Request, reason: str, now: float) -> None:
        """Finish a request from any place and release all that it holds; the only way out."""
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
        self.num_rows -= request.num_rows
        self.policy.vacate(request)
        self._leave_row(request)
        if request.beams is not None:
            self.drop_rows(request.beams.further_names)

    def _leave_row(self, request: Request) -> None:
        """Let the next plan tell the worker to free the request's row, if it has one."""
        if request.has_row:
            self._vacated.append(request.request_id)
            request.has_row = False

    def drop_rows(self, names: list[str]) -> None:
        """Free rows of beams, and their blocks."""
        self._vacated += names
        self._kv.free_tables(names)

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
        is_running = [one for one in self._requests.values() if one.status is RequestStatus.RUNNING]
        expected = {request.request_id for request in is_running}
        beams = [name for one in is_running if one.beams is not None for name in one.beams.further_names]
        if expected != set(running) or expected.union(beams) != self._kv.holders():
            raise IntegrityError("running requests and holders of blocks differ", state)
        if self.num_rows != sum(request.num_rows for request in is_running):
            raise IntegrityError(f"running requests do not take {self.num_rows} rows", state)
        if not self._kv.swapped() <= self._requests.keys() - running:
            raise IntegrityError("a swapped request is running or unknown", state)
