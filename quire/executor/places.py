"""Which part of a model each of several processes has, and the groups in which they meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.distributed.group import ALONE, Group
from quire.distributed.shared_memory import share_memory
from quire.kernels import cpu
from quire.layers.shard import Shard
from quire.models.stages import Stage

if TYPE_CHECKING:
    from quire.distributed.gloo import Store

JOIN_S = 300.0
"""Ranks start together, and whoever started them sees when one ends; but a busy machine may take long to load them."""
STAGE_S = 3600.0
"""How long a stage may be waited for that runs: it computes whole steps, of whatever length."""


@dataclass(frozen=True)
class Place:
    """Of a rank: all ranks, those that have the other shares of its stage, and those with its share of other stages."""

    world: Group = ALONE
    shares: Group = ALONE
    stages: Group = ALONE

    @property
    def shard(self) -> Shard:
        """Its share of each layer."""
        return Shard.of_group(self.shares)

    @property
    def stage(self) -> Stage:
        """The layers that it has."""
        return Stage.of_group(self.stages)

    @property
    def has_results(self) -> bool:
        """Whether the executor hears from it what came of a step."""
        return self.shard.rank == 0 and self.stage.is_last

    def close(self) -> None:
        """Leave all groups."""
        for group in (self.shares, self.stages, self.world):
            group.close()


def meet(rank: int, num_shares: int, num_stages: int, store: Store) -> Place:
    """The place of one of num_shares * num_stages ranks, once all have come.

    Raises:
        StartupError: not all ranks came; the message names those that did not.
    """
    from quire.distributed.gloo import Gloo, part_of  # which one rank does not need

    size, (stage, share) = num_shares * num_stages, divmod(rank, num_shares)
    world = Gloo(rank, size, store, join_s=JOIN_S)
    if num_stages == 1:
        return Place(world, share_memory(world, able=cpu.available()))
    shares: Group = ALONE
    if num_shares > 1:
        names = range(stage * num_shares, (stage + 1) * num_shares)
        shares = Gloo(share, num_shares, part_of(store, f"stage {stage}"), names=names)
    row = part_of(store, f"share {share}")
    stages = Gloo(stage, num_stages, row, answer_s=STAGE_S, names=range(share, size, num_shares))
    return Place(world, share_memory(shares, able=cpu.available()), stages)
