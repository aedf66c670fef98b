# SPDX-License-Identifier: Apache-2.0
"""Sleep state of an engine: levels, separately waking parts, and request options.

Invariant: pure. The front end and each core keep their own state and apply the same changes in the same order, so they
agree without communication.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import ConflictError, ValidationError

WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
MEMORY_TAGS = (WEIGHTS, KV_CACHE)  # Parts that hold memory, in waking order: a cache is bound to a model.
TAGS = (*MEMORY_TAGS, SCHEDULING)
LEVELS: dict[int, frozenset[str]] = {0: frozenset({SCHEDULING}), 1: frozenset(TAGS), 2: frozenset(TAGS)}
"""Level -> sleeping parts. 0 plans no step; 1 releases the KV cache and offloads the weights; 2 discards the weights,
too.
"""
AWAKE = "awake"
# Handling of requests in flight: abort them, wait for them, or continue them after waking.
MODES = ("abort", "wait", "keep")
FIRST_VERSION = "default"
"""Version of the weights with which an engine starts."""


@dataclass(frozen=True)
class EngineSleepState:
    """Deepest level requested since the engine was last awake, and the tags asleep now.

    `admits`: new requests are queued, not refused. `weight_version` names the weights, asleep or not.
    """

    level: int = 0
    asleep: frozenset[str] = frozenset()
    admits: bool = False
    weight_version: str = FIRST_VERSION

    def __bool__(self) -> bool:
        return bool(self.asleep)

    @property
    def state(self) -> str:
        """State name of the metric."""
        if WEIGHTS not in self.asleep:
            return AWAKE
        return "discard_all" if self.level == 2 else "weights_offloaded"

    def verbs(self) -> list[tuple[str, list[Any]]]:
        """Return a core's utility calls, with arguments, that bring an awake core into this state."""
        if not self:
            return []
        woken = [tag for tag in MEMORY_TAGS if self.level and tag not in self.asleep]
        return [("sleep", [self.level]), *([("wake_up", [woken])] if woken else [])]

    @property
    def refuses(self) -> bool:
        """True if new requests are refused."""
        return bool(self.asleep) and not self.admits

    def deeper(self, level: int, *, admits: bool = False) -> EngineSleepState:
        """Return the state after sleeping to this level; deeper sleep continues, and so does a refusal of requests."""
        admits = admits and not self.refuses
        return replace(self, level=max(self.level, level), asleep=self.asleep | LEVELS[level], admits=admits)

    def without(self, tags: Collection[str]) -> EngineSleepState:
        """Return the state after waking these tags. Scheduling wakes by itself once all memory is restored.

        Raises:
            ConflictError: a tag depends on one that would stay asleep.
        """
        left = self.asleep.difference(tags)
        if KV_CACHE in tags and WEIGHTS in left:
            raise ConflictError("the KV cache cannot wake before the weights: wake weights, too, or first")
        if SCHEDULING in tags and left:
            raise ConflictError(f"scheduling cannot wake before {', '.join(sorted(left))}")
        if left.intersection(MEMORY_TAGS):
            return replace(self, asleep=left)
        return EngineSleepState(weight_version=self.weight_version)


def check_level(level: Any) -> int:
    """Return the level; raise ValidationError if it does not exist."""
    if isinstance(level, bool) or level not in LEVELS:
        raise ValidationError(
            f"level must be one of {', '.join(map(str, LEVELS))}, got {level!r:.100}", param="level"
        )
    return int(level)


def check_mode(mode: Any) -> str:
    """Return the mode; raise ValidationError if it does not exist."""
    if mode not in MODES:
        raise ValidationError(f"mode must be one of {', '.join(MODES)}, got {mode!r:.100}", param="mode")
    return str(mode)


def check_tags(tags: Collection[str] | None) -> list[str]:
    """Return the tags to wake; None: all.

    Raises:
        ValidationError: a tag does not exist.
    """
    if tags is None:
        return list(TAGS)
    for tag in tags:
        if tag not in TAGS:
            raise ValidationError(f"tags must be of {', '.join(TAGS)}, got {tag!r:.100}", param="tags")
    return [tag for tag in TAGS if tag in tags]
