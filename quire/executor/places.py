"""Which part of a model each of several processes has, and the groups in which they meet."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.config.device import ParallelConfig
from quire.distributed.group import ALONE, Group
from quire.distributed.hosts import Hosts, size_of_hosts
from quire.distributed.shared_memory import share_memory
from quire.kernels import cpu
from quire.layers.shard import Shard
from quire.models.stages import Stage

if TYPE_CHECKING:
    from quire.distributed.gloo import Gloo, Store

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
    experts: Group | None = None
    """Ranks of all replicas, where these share out whole experts."""

    @property
    def shard(self) -> Shard:
        """Its share of each layer."""
        return Shard.of_group(self.shares, self.experts)

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
        for group in (self.experts, self.shares, self.stages, self.world):
            if group is not None:
                group.close()


def meet(rank: int, parallel: ParallelConfig, store: Store, address: str, device: str = "cpu") -> Place:
    """The place of a rank that is reached at `address` and computes on such a device, once all have come.

    Raises:
        StartupError: not all ranks came, and the message names those that did not; or their devices cannot be joined.
    """
    from quire.distributed.gloo import Gloo, part_of  # which one rank does not need

    num_shares, size, num_stages = (
        parallel.tensor_parallel_size,
        parallel.num_ranks,
        parallel.pipeline_parallel_size,
    )
    stage, share = divmod(rank, num_shares)
    world = Gloo(rank, size, store, address=address, join_s=JOIN_S)
    hosts = [
        world.host_of(one) if parallel.nnodes == 1 else one // (size // parallel.nnodes)
        for one in range(size)
    ]
    if num_stages == 1:
        return Place(world, _nearer(world, hosts, store, address, device))
    shares: Group = ALONE
    if num_shares > 1:
        names, at = range(stage * num_shares, (stage + 1) * num_shares), part_of(store, f"stage {stage}")
        group = Gloo(share, num_shares, at, address=address, names=names)
        shares = _nearer(group, hosts[names.start : names.stop], at, address, device)
    row = part_of(store, f"share {share}")
    names = range(share, size, num_shares)
    stages = Gloo(stage, num_stages, row, address=address, answer_s=STAGE_S, names=names)
    return Place(world, shares, stages if device == "cpu" else shortened(stages, row, device))


def shortened(group: Gloo, store: Store, device: str, *, able: bool = True) -> Group:
    """The same ranks: with memory in common, if they are able to have it, as on one host; or with their devices joined.

    Raises:
        StartupError: these cannot be.
    """
    if device == "cpu":
        return share_memory(group, able=able and cpu.available())
    from quire.distributed.device_group import join_devices  # which the host alone does not need

    return join_devices(group, store, device)


def _nearer(group: Gloo, hosts: Sequence[Hashable], store: Store, address: str, device: str) -> Group:
    """The same ranks, which are on such hosts; those of each have a shorter way between them, if that can be.

    What joins devices knows by itself which are near each other.
    """
    from quire.distributed.gloo import Gloo, part_of

    if device != "cpu" or len(set(hosts)) == 1:
        return shortened(group, store, device)
    size = size_of_hosts(hosts)
    if size is None:
        return group
    host, place = divmod(group.rank, size)
    near, far = range(host * size, (host + 1) * size), range(place, group.size, size)
    here, across = (
        Gloo(
            ranks.index(group.rank),
            len(ranks),
            part_of(store, f"{name} {number}"),
            address=address,
            join_s=JOIN_S,
            names=[group.names[rank] for rank in ranks],
        )
        for name, number, ranks in (("host", host, near), ("place", place, far))
    )
    return Hosts(group, share_memory(here, able=cpu.available()), across)


def with_replicas(place: Place, rank: int, config: EngineConfig) -> Place:
    """The place of a rank whose replica shares experts with others, once the ranks of all of them have come.

    It waits for a rank of another replica, whose core may hang or be stopped, as long as a core is let compute.

    Raises:
        StartupError: not all came; ranks are counted over all replicas.
    """
    from quire.distributed.gloo import Gloo, file_store

    parallel = config.parallel
    size, number = parallel.num_expert_ranks, parallel.first_replica * parallel.num_ranks + rank
    store = file_store(Path(config.meeting) / "ranks", size)
    answer_s = config.supervision.longest_step_s or STAGE_S
    experts = Gloo(number, size, store, join_s=JOIN_S, answer_s=answer_s)
    return replace(place, experts=share_memory(experts, able=cpu.available(), answer_s=answer_s))
