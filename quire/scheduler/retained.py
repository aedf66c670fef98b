# SPDX-License-Identifier: Apache-2.0
"""Finished requests whose blocks stay for forks.

Beam search needs them: each of its steps finishes all beams and starts others as their forks. Invariant: retained
blocks are freed first when blocks are short; a fork that comes too late computes again what it would have shared. A
retained request is dropped once it is closed and has no waiting fork.
"""

from __future__ import annotations

from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.request import Request


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

    def is_last_fork(self, fork: Request) -> bool:
        """Return whether the request that it forks is dropped as soon as it has started."""
        parent = fork.parent
        return (
            parent is not None
            and parent.request_id in self._closed
            and self._waiting[parent.request_id] == {fork}
        )

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
