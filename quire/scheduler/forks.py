# SPDX-License-Identifier: Apache-2.0
"""Requests that start with the whole prompt of another one (`n` completions).

Invariant: a child is held only while its parent is unfinished and has sampled nothing, so it waits for work that is
done anyway and never forever. A preempted parent still resumes, and precedes a child of the same priority and tenant.
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


def _same_prompt(child: Request, parent: Request) -> bool:
    """Compare prompts and keys; forks added in one message share one list, which need not be compared."""
    mine, theirs = child.prompt_token_ids, parent.prompt_token_ids
    return (mine is theirs or mine == theirs) and child.extra_keys == parent.extra_keys
