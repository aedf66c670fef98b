"""Forks: requests that begin with the whole prompt of another one, as the `n` completions of a prompt do, or with all
that a kept one has computed, as the next beams of a search do.

Invariant: a child is held only while its parent is unfinished and has sampled nothing yet; so it waits for work that
is being done anyway, and never for ever. That holds for a parent that is preempted, too: it comes back, and in the
order of service it stands before a child of the same priority and tenant.
"""

from __future__ import annotations

from quire.errors import ValidationError
from quire.scheduler.explain import Cause
from quire.scheduler.holds import Hold
from quire.scheduler.request import Request


def make_fork(child: Request, parent: Request) -> list[Hold]:
    """Let a new request share the prompt of another; it is held until the parent has computed it.

    The key is the parent, to be released when it has sampled its first token. No hold if it has done that already.

    Raises:
        ValidationError: the two do not begin with the same prompt under the same keys.
    """
    if not _same_prompt(child, parent):
        raise ValidationError(
            f"request {child.request_id!r} is no fork of {parent.request_id!r}: their prompts differ",
            param="fork_of",
        )
    child.parent = parent
    return [] if parent.num_output_tokens else [Hold(parent, Cause.SHARED_PROMPT)]


def make_successor(child: Request, parent: Request) -> None:
    """Let a new request share all that a kept one has computed, and take its turn.

    Raises:
        ValidationError: it does not begin with these tokens under the same keys, or is no beam of the same search.
    """
    num_tokens = parent.num_computed_tokens
    is_longer = (
        child.num_tokens > num_tokens and child.token_ids[:num_tokens] == parent.token_ids[:num_tokens]
    )
    if not is_longer or child.extra_keys != parent.extra_keys or child.num_beams != parent.num_beams:
        raise ValidationError(
            f"request {child.request_id!r} does not go on from {parent.request_id!r}", param="fork_of"
        )
    child.parent = parent


def _same_prompt(child: Request, parent: Request) -> bool:
    """Forks that came in one message share one list, which need not be compared."""
    mine, theirs = child.prompt_token_ids, parent.prompt_token_ids
    return (mine is theirs or mine == theirs) and child.extra_keys == parent.extra_keys
