"""What of an engine sleeps: the levels, the parts that wake apart, and what a request to sleep or wake may say.

Invariant: pure. The front end and each core keep a `Rest` of their own, changed by the same verbs in the same order, so
they agree without asking each other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from quire.errors import ConflictError, ValidationError

WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
MEMORY_TAGS = (WEIGHTS, KV_CACHE)
"""What holds memory, in the order in which it wakes: a cache is bound to a model."""
TAGS = (*MEMORY_TAGS, SCHEDULING)
LEVELS: dict[int, frozenset[str]] = {0: frozenset({SCHEDULING}), 1: frozenset(TAGS), 2: frozenset(TAGS)}
"""Level -> what sleeps: 0 plans no step; 1 gives back the KV cache, and keeps the weights where they cost least; 2 lets
go of the weights, too."""
AWAKE = "awake"
MODES = ("abort", "wait", "keep")
"""What becomes of requests in flight: they end at once, are waited for, or go on when the engine wakes."""


@dataclass(frozen=True)
class Rest:
    """The deepest level that was asked for since the engine was awake, and the tags that are asleep now."""

    level: int = 0
    asleep: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.asleep)

    @property
    def state(self) -> str:
        """In the words of the metric."""
        if WEIGHTS not in self.asleep:
            return AWAKE
        return "discard_all" if self.level == 2 else "weights_offloaded"

    def verbs(self) -> list[tuple[str, list[Any]]]:
        """Utilities of a core, with their arguments, that bring one that is awake here; none for who is awake."""
        if not self:
            return []
        woken = [tag for tag in MEMORY_TAGS if self.level and tag not in self.asleep]
        return [("sleep", [self.level]), *([("wake_up", [woken])] if woken else [])]

    def deeper(self, level: int) -> Rest:
        """After falling asleep to this level; what sleeps deeper goes on doing so."""
        return Rest(max(self.level, level), self.asleep | LEVELS[level])

    def without(self, tags: Collection[str]) -> Rest:
        """After these have woken. Scheduling wakes by itself when all memory is there.

        Raises:
            ConflictError: one of them needs another that would still sleep.
        """
        left = self.asleep.difference(tags)
        if KV_CACHE in tags and WEIGHTS in left:
            raise ConflictError("the KV cache cannot wake before the weights: wake weights, too, or first")
        if SCHEDULING in tags and left:
            raise ConflictError(
                f"scheduling cannot wake before the rest, and {', '.join(sorted(left))} sleeps"
            )
        return Rest(self.level, left) if left.intersection(MEMORY_TAGS) else Rest()


def check_level(level: Any) -> int:
    """Raises ValidationError unless there is such a level."""
    if isinstance(level, bool) or level not in LEVELS:
        raise ValidationError(
            f"level must be one of {', '.join(map(str, LEVELS))}, got {level!r:.100}", param="level"
        )
    return int(level)


def check_mode(mode: Any) -> str:
    """Raises ValidationError unless there is such a mode."""
    if mode not in MODES:
        raise ValidationError(f"mode must be one of {', '.join(MODES)}, got {mode!r:.100}", param="mode")
    return str(mode)


def check_tags(tags: Collection[str] | None) -> list[str]:
    """The tags to wake; None: all.

    Raises:
        ValidationError: there is no such tag.
    """
    if tags is None:
        return list(TAGS)
    for tag in tags:
        if tag not in TAGS:
            raise ValidationError(f"tags must be of {', '.join(TAGS)}, got {tag!r:.100}", param="tags")
    return [tag for tag in TAGS if tag in tags]
