# SPDX-License-Identifier: Apache-2.0
"""Requests that share what others have computed, and finished requests that are retained for them.

Forks start with the whole prompt of another request (`n` completions), or with all that a retained request has
computed (the next beams of a search, each of whose steps finishes all beams). Invariant: a child is held only while its
parent is unfinished and has sampled nothing, so it waits for work that is done anyway and never forever. A preempted
parent still resumes, and precedes a child of the same priority and tenant. Retained blocks are freed first when blocks
are short; a fork that comes too late computes again what it would have shared.
"""

from __future__ import annotations

from quire.errors import ValidationError
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.explain import Cause
from quire.scheduler.holds import Hold
from quire.scheduler.request import Request


def make_fork(child: Request, parent: Request) -> list[Hold]:
    """Let a new request share the prompt of another one, held until the parent has computed it.

    The hold's key is the parent, to be released when it has sampled its first token. No hold if it has done so already.

    Raises:
        ValidationError: the two prompts or their extra keys differ.
    """
    if not _same_prompt(child, parent):
        raise ValidationError(
            f"request {child.request_id!r} is no fork of {parent.request_id!r}: their prompts differ",
            param="fork_of",
        )
    child.parent = parent
    return [] if parent.num_output_tokens else [Hold(parent, Cause.SHARED_PROMPT)]


def make_successor(child: Request, parent: Request) -> None:
    """Let a new request continue a retained one, sharing all that it has computed and its place in the order.

    Raises:
        ValidationError: it does not begin with these tokens under the same keys, or is no beam of the same search.
    """
    num_tokens = parent.num_computed_tokens
    is_longer = (
        child.num_tokens > num_tokens and child.token_ids[:num_tokens] == parent.token_ids[:num_tokens]
    )
    if not is_longer or child.extra_keys != parent.extra_keys or child.num_beams != parent.num_beams:
        raise ValidationError(
            f"request {child.request_id!r} is no continuation of {parent.request_id!r}", param="fork_of"
        )
    child.parent = parent


def _same_prompt(child: Request, parent: Request) -> bool:
    """Compare prompts and keys; forks added in one message share one list, which need not be compared."""
    mine, theirs = child.prompt_token_ids, parent.prompt_token_ids
    return (mine is theirs or mine == theirs) and child.extra_keys == parent.extra_keys


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
