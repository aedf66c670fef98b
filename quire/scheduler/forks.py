"""Forks: requests that begin with the whole prompt of another one, as the `n` completions of a prompt do.

Invariant: a child waits here only while its parent is unfinished and has sampled nothing yet; so it waits for
work that is being done anyway, and never for ever.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.errors import ValidationError
from quire.scheduler.request import Request


class HeldForks:
    """Children that wait until their parent has computed the prompt they share."""

    def __init__(self) -> None:
        self._children: dict[str, dict[str, Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._children.values()))

    def __iter__(self) -> Iterator[Request]:
        return (child for children in self._children.values() for child in children.values())

    def hold(self, child: Request, parent: Request) -> bool:
        """Keep a child until its parent is released; False, and nothing done, if the parent is past its prompt.

        Raises:
            ValidationError: the two do not begin with the same prompt under the same keys.
        """
        if not _same_prompt(child, parent):
            raise ValidationError(
                f"request {child.request_id!r} is no fork of {parent.request_id!r}: their prompts differ",
                param="fork_of",
            )
        child.parent = parent
        if parent.num_output_tokens:
            return False
        self._children.setdefault(parent.request_id, {})[child.request_id] = child
        return True

    def release(self, parent: Request) -> list[Request]:
        """Let the children of a request go; returns them in the order in which they came."""
        return [*self._children.pop(parent.request_id, {}).values()]

    def discard(self, child: Request) -> bool:
        """Take out a child that has ended; False if it is not here."""
        siblings = self._children.get(child.parent.request_id, {}) if child.parent else {}
        return siblings.pop(child.request_id, None) is not None


def _same_prompt(child: Request, parent: Request) -> bool:
    """Forks that came in one message share one list, which need not be compared."""
    mine, theirs = child.prompt_token_ids, parent.prompt_token_ids
    return (mine is theirs or mine == theirs) and child.extra_keys == parent.extra_keys
