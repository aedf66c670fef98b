"""The first rank's clock, for all ranks of a group: what they guess with crosses them, so they must guess alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.spec_decode.clocks import Clocks, OwnClock


class SharedClocks(OwnClock):
    """Every rank measures, and what the first one has measured counts; once per step a few numbers cross."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        first: list[float] = self._group.all_gather(torch.tensor(seconds, dtype=torch.float64))[0].tolist()
        return first


def clocks_of(config: EngineConfig, group: Group) -> Clocks:
    """Those of a rank: shared where guesses cross ranks, or become part of plans that each rank makes for itself."""
    crosses = config.draft is not None or config.parallel.plans_on_each_rank
    return all_clocks(group) if crosses else OwnClock()


def all_clocks(group: Group) -> Clocks:
    """Those of a group whose ranks all ask: what is measured with them is the same for all."""
    return SharedClocks(group) if group.size > 1 else OwnClock()
