# SPDX-License-Identifier: Apache-2.0
"""Requests that share what others have computed.

Forks start with the whole prompt of another request (`n` completions), or with all that a retained request has
computed (the next beams of a search). Invariant: a child is held only while its parent is unfinished and has sampled
nothing, so it waits for work that is done anyway and never forever. A preempted parent still resumes, and precedes a
child of the same priority and tenant.
"""

from __future__ import annotations

from quire.errors import ValidationError
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
