# SPDX-License-Identifier: Apache-2.0
"""Rank groups: a process's tensor parallel, pipeline and expert groups; agreement of ranks before they start."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.config.device import ParallelConfig
from quire.distributed.group import ALONE, Group, HostGroups, check_same, check_same_word, ranks_per_host
from quire.distributed.shared_memory import share_memory
from quire.kernels import cpu
from quire.kernels.cpu.instruction_sets import VARIABLE, arithmetic
from quire.layers.shard import Shard
from quire.models.identity import PLANNING_FIELDS, model_of, options_of
from quire.models.stages import Stage
from quire.version import __version__

if TYPE_CHECKING:
    from quire.distributed.gloo import Gloo, Store


# Ranks start together and their starter detects deaths, but loading may be slow on a busy machine.
JOIN_S = 300.0
STAGE_S = 3600.0  # Longest wait for a running pipeline stage, whose steps may be of any length.


@dataclass(frozen=True)
class RankGroups:
    """Groups of a rank: all ranks, its tensor parallel group, and the ranks with its shard in other stages."""

    world: Group = ALONE
    shares: Group = ALONE
    stages: Group = ALONE
    experts: Group | None = None  # Ranks of all replicas that share experts.

    @property
    def shard(self) -> Shard:
        """Tensor parallel shard of each layer."""
        return Shard.of_group(self.shares, self.experts)

    @property
    def stage(self) -> Stage:
        """Pipeline stage."""
        return Stage.of_group(self.stages)

    @property
    def has_results(self) -> bool:
        """True if this rank sends step results to the executor."""
        return self.shard.rank == 0 and self.stage.is_last

    def close(self) -> None:
        """Close all groups."""
        for group in (self.experts, self.shares, self.stages, self.world):
            if group is not None:
                group.close()


def meet(rank: int, parallel: ParallelConfig, store: Store, address: str, device: str = "cpu") -> RankGroups:
    """Create the groups of a rank reached at `address`, once all ranks have joined.

    Raises:
        StartupError: not all ranks joined (names the missing ones), or their devices cannot be joined.
    """
    from quire.distributed.gloo import Gloo, prefix_store  # which one rank does not need

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
        return RankGroups(world, _with_host_transport(world, hosts, store, address, device))
    shares: Group = ALONE
    if num_shares > 1:
        names, at = range(stage * num_shares, (stage + 1) * num_shares), prefix_store(store, f"stage {stage}")
        group = Gloo(share, num_shares, at, address=address, names=names)
        shares = _with_host_transport(group, hosts[names.start : names.stop], at, address, device)
    row = prefix_store(store, f"share {share}")
    names = range(share, size, num_shares)
    stages = Gloo(stage, num_stages, row, address=address, answer_s=STAGE_S, names=names)
    return RankGroups(world, shares, stages if device == "cpu" else with_fast_transport(stages, row, device))


def with_fast_transport(group: Gloo, store: Store, device: str, *, able: bool = True) -> Group:
    """Upgrade a group to shared memory, if on one host, or to a device transport.

    Raises:
        StartupError: the devices cannot be joined.
    """
    if device == "cpu":
        return share_memory(group, able=able and cpu.available())
    from quire.distributed.device_group import join_devices  # which the host alone does not need

    return join_devices(group, store, device)


def _with_host_transport(
    group: Gloo, hosts: Sequence[Hashable], store: Store, address: str, device: str
) -> Group:
    """Upgrade a group on these hosts: shared memory within each host, if possible.

    Device transports find the topology by themselves.
    """
    from quire.distributed.gloo import Gloo, prefix_store

    if device != "cpu" or len(set(hosts)) == 1:
        return with_fast_transport(group, store, device)
    size = ranks_per_host(hosts)
    if size is None:
        return group
    host, place = divmod(group.rank, size)
    near, far = range(host * size, (host + 1) * size), range(place, group.size, size)
    here, across = (
        Gloo(
            ranks.index(group.rank),
            len(ranks),
            prefix_store(store, f"{name} {number}"),
            address=address,
            join_s=JOIN_S,
            names=[group.names[rank] for rank in ranks],
        )
        for name, number, ranks in (("host", host, near), ("place", place, far))
    )
    return HostGroups(group, share_memory(here, able=cpu.available()), across)


def with_replicas(groups: RankGroups, rank: int, config: EngineConfig) -> RankGroups:
    """Add the expert group of replicas that share experts, once the ranks of all of them have joined.

    A rank of another replica, whose core may hang or be stopped, is waited for as long as a step may take.

    Raises:
        StartupError: not all joined; ranks are counted over all replicas.
    """
    from quire.distributed.gloo import Gloo, file_store

    parallel = config.parallel
    size, number = parallel.num_expert_ranks, parallel.first_replica * parallel.num_ranks + rank
    store = file_store(Path(config.meeting) / "ranks", size)
    answer_s = config.supervision.longest_step_s or STAGE_S
    experts = Gloo(number, size, store, join_s=JOIN_S, answer_s=answer_s)
    return replace(groups, experts=share_memory(experts, able=cpu.available(), answer_s=answer_s))


def check_ranks_agree(group: Group, config: EngineConfig) -> None:
    """Check that every rank has the same version, configuration and checkpoint, and the same instruction set.

    Each rank samples by itself, from logits that include its own partial sums, so different rounding could give
    different tokens.

    Raises:
        StartupError: names the difference and the ranks that differ from rank 0; for instructions, every rank's set.
    """
    check_same(group, {"version of quire": __version__.encode()})  # first: it defines what is compared next
    check_same(group, options_of(config, PLANNING_FIELDS))
    check_same(group, model_of(config))
    if config.device.device == "cpu":
        advice = (
            f"set {VARIABLE} to an instruction set of all processors, and install the kernels on all hosts"
        )
        check_same_word(group, "instruction set", arithmetic(), advice)
