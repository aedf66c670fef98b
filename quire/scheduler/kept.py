"""Kept requests: ended ones whose blocks stay for a while, so that others can go on from where they ended.

That is what the beams of a search do: each step of it ends all of them, and begins others as their forks.

Invariant: kept blocks stand in nobody's way: whoever is short of blocks has them given back first, and a fork that
comes too late computes again what it would have shared. A kept request is forgotten once it is closed and no fork
waits.
"""

from __future__ import annotations

from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.request import Request


class KeptRequests:
    """Owns the requests that ended and are kept."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._kept: dict[str, Request] = {}
        self._waiting: dict[str, set[Request]] = {}
        self._closed: set[str] = set()
        self._with_blocks: dict[str, Request] = {}

    def keep(self, request: Request) -> None:
        """A request has ended, and its blocks stay."""
        self._kept[request.request_id] = self._with_blocks[request.request_id] = request
        self._waiting[request.request_id] = set()

    def get(self, request_id: str) -> Request | None:
        """The kept request of this id."""
        return self._kept.get(request_id)

    def has_blocks(self, request: Request) -> bool:
        """Whether forks of a request can still share what it computed."""
        return self._with_blocks.get(request.request_id) is request

    @property
    def holders(self) -> set[str]:
        """Ids of those that hold blocks."""
        return set(self._with_blocks)

    def expect(self, fork: Request, parent: Request) -> None:
        """A fork of a kept request was added."""
        self._waiting[parent.request_id].add(fork)

    def settle(self, fork: Request) -> None:
        """A request has started, or ended: it needs no other for it any more."""
        if fork.parent is None or self._kept.get(fork.parent.request_id) is not fork.parent:
            return
        self._waiting[fork.parent.request_id].discard(fork)
        self._forget_unused(fork.parent.request_id)

    def close(self, request_id: str) -> None:
        """No more forks of this request will come; an unknown one is fine."""
        if request_id in self._kept:
            self._closed.add(request_id)
            self._forget_unused(request_id)

    def drop_blocks(self) -> bool:
        """Give back the blocks of all kept requests; False if there were none."""
        dropped, self._with_blocks = self._with_blocks, {}
        for request in dropped.values():
            self._kv.free(request)
        return bool(dropped)

    def _forget_unused(self, request_id: str) -> None:
        if request_id not in self._closed or self._waiting[request_id]:
            return
        self._closed.discard(request_id)
        del self._kept[request_id], self._waiting[request_id]
        request = self._with_blocks.pop(request_id, None)
        if request is not None:
            self._kv.free(request)
