# SPDX-License-Identifier: Apache-2.0
"""Checksums of weights: those of ranks together, of replicas compared. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import EngineError, ValidationError


def merged(cores: Sequence[Sequence[Mapping[str, str]]]) -> dict[str, str]:
    """Return name -> digest of one replica; with several ranks a name ends in "@" and the rank.

    Raises:
        EngineError: replicas have different weights.
    """
    each = [_of_core(ranks) for ranks in cores]
    if any(other != each[0] for other in each):
        raise EngineError("replicas have different weights")
    return each[0]


def _of_core(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    if len(ranks) == 1:
        return dict(ranks[0])
    return {f"{name}@{rank}": digest for rank, one in enumerate(ranks) for name, digest in one.items()}


def check_baseline(baseline: Any) -> Mapping[str, str]:
    """Return a baseline of digests.

    Raises:
        ValidationError: it is none.
    """
    if not isinstance(baseline, Mapping) or not all(isinstance(one, str) for one in baseline.values()):
        raise ValidationError(
            "baseline must be an object of name -> digest, as checksum returns it", param="baseline"
        )
    return baseline


def compare(now: Mapping[str, str], baseline: Mapping[str, str]) -> list[str]:
    """Return the names whose digests differ, or that only one of both has."""
    return sorted(name for name in now.keys() | baseline.keys() if now.get(name) != baseline.get(name))
