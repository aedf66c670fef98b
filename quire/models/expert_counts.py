# SPDX-License-Identifier: Apache-2.0
"""Detection of expert counts that differ from config.json, reported once instead of tensor by tensor."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_ONE_OF_THEM = re.compile(r"^(?P<layer>.*\bexperts)\.(?P<index>\d+)\.")


@dataclass(frozen=True)
class ExpertCountDifference:
    """Numbers of experts of some layers, given by their paths."""

    wanted: int
    found: int
    layers: tuple[str, ...]

    def __str__(self) -> str:
        """Return a phrase for users."""
        first, *others = self.layers
        more = f" and {len(others)} more layers" if others else ""
        return f"config.json says {self.wanted} experts, and the files have {self.found} in {first}{more}"

    def explains(self, tensor: str) -> bool:
        """Return whether this difference is why a tensor is left over or missing."""
        match = _ONE_OF_THEM.match(tensor)
        return match is not None and match["layer"] in self.layers and int(match["index"]) >= self._common

    @property
    def _common(self) -> int:
        return min(self.wanted, self.found)


def differences(wanted: Iterable[str], found: Iterable[str]) -> list[ExpertCountDifference]:
    """Return the differences between the wanted and the stored tensors, if experts are stored one by one in both."""
    ours, theirs = _counts(wanted), _counts(found)
    layers: dict[tuple[int, int], list[str]] = defaultdict(list)
    for layer in ours.keys() & theirs.keys():
        if ours[layer] != theirs[layer]:
            layers[ours[layer], theirs[layer]].append(layer)
    return [ExpertCountDifference(*counts, tuple(sorted(names))) for counts, names in sorted(layers.items())]


def _counts(tensors: Iterable[str]) -> Mapping[str, int]:
    """Return path of each layer's experts -> highest expert number plus one."""
    counts: dict[str, int] = {}
    for match in filter(None, map(_ONE_OF_THEM.match, tensors)):
        counts[match["layer"]] = max(counts.get(match["layer"], 0), int(match["index"]) + 1)
    return counts
