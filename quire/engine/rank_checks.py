# SPDX-License-Identifier: Apache-2.0
"""Checks of parallel configurations before any rank starts: devices, hosts, pipeline stages, experts.

Invariant: units of tensor parallelism are those that the layers declare (`quire.layers.shard`). Shards in units that
only a checkpoint's format defines, such as groups of quantized weights, are checked by the layers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from quire.adapters import ENABLE_FLAG
from quire.config import EngineConfig, ModelArch, ParallelConfig
from quire.config.arch import LayerShape
from quire.errors import ConfigError
from quire.platforms import Host

logger = logging.getLogger(__name__)


def check_device_ranks(config: EngineConfig) -> None:
    """Raise ConfigError if an option does not support ranks on devices of their own."""
    device, parallel = config.device.device, config.parallel
    if device == "cpu":
        return
    if parallel.tp_invariant:
        raise ConfigError(
            f"--tp-invariant requires --device cpu, not {device}: device libraries choose kernels by matmul shapes, "
            "which depend on the number of ranks"
        )
    num = parallel.num_ranks * parallel.data_parallel_size
    if num == 1:
        return
    executor = parallel.distributed_executor_backend
    wants = {
        f"--distributed-executor-backend mp or external_launcher, not {executor}: it does not support devices": executor
        not in ("mp", "external_launcher", "uni", "null"),
        "no --enable-expert-parallel: devices shard each expert by features": parallel.enable_expert_parallel,
    }
    require(wants, f"--device is {device}, with {num} ranks")


def require(requirements: Mapping[str, bool], what: str) -> None:
    """Raise ConfigError for the first requirement that is not met."""
    for required, violated in requirements.items():
        if violated:
            raise ConfigError(f"{what}, which requires {required}")


MAX_RANKS = 64  # Largest rank count tried for a model without attention.


class ShardedUnits(NamedTuple):
    """Number of units divided evenly among ranks; replicable ones may be fewer than the ranks."""

    number: int
    name: str
    are_replicated: bool = False

    def is_shardable(self, size: int) -> bool:
        """Return whether `size` ranks can shard them."""
        return self.number % size == 0 or (self.are_replicated and size % self.number == 0)


def unshardable_units(config: EngineConfig, size: int) -> str | None:
    """Return the units of a model that cannot be sharded over `size` ranks; None: all can."""
    for units in _units(config):
        if not units.is_shardable(size):
            return f"{units.number} {units.name}"
    return None


def valid_tp_sizes(config: EngineConfig) -> list[int]:
    """Return the tensor parallel sizes over which the whole model can be sharded."""
    return [
        size
        for size in range(1, (config.arch.num_heads or MAX_RANKS) + 1)
        if unshardable_units(config, size) is None
    ]


def _units(config: EngineConfig) -> Iterator[ShardedUnits]:
    arch, experts = config.arch, config.arch.experts
    for shape in dict.fromkeys(arch.layer_shapes) or (arch,):
        yield ShardedUnits(shape.num_heads, "attention heads")
        yield ShardedUnits(shape.num_kv_heads, "key-value heads", are_replicated=True)
        has_mlp = not isinstance(shape, LayerShape) or shape.block is None
        if has_mlp and any(arch.mlp_of(layer) != "sparse" for layer in range(arch.num_layers)):
            yield ShardedUnits(shape.intermediate_size, "features of its MLPs")
    if "differential_attention" in arch.layer_types:
        yield ShardedUnits(arch.num_heads // 2, "pairs of attention heads")
        yield ShardedUnits(arch.num_kv_heads // 2, "pairs of key-value heads", are_replicated=True)
    if "mixture_of_attention" in arch.layer_types:
        yield ShardedUnits(arch.num_kv_heads, "heads of each of its attention's experts")
    if arch.token_rows is not None:
        yield ShardedUnits(arch.token_rows.size, "features of the per-layer token embedding")
    if experts is not None and not config.parallel.enable_expert_parallel:
        yield ShardedUnits(experts.intermediate_size, "features of each of its experts")
    if experts is not None and experts.shared_size:
        yield ShardedUnits(experts.shared_size, "features of its shared experts")
    yield from _state_units(arch)


def _state_units(arch: ModelArch) -> Iterator[ShardedUnits]:
    """Yield the units of layers with recurrent states."""
    if arch.mamba is not None:
        yield ShardedUnits(arch.mamba.channels, "channels with a state")
    if arch.mamba2 is not None:
        yield ShardedUnits(arch.mamba2.heads, "heads with a state")
        yield ShardedUnits(arch.mamba2.groups, "groups of heads with a state", are_replicated=True)
    if arch.plamo2_mamba is not None:
        yield ShardedUnits(arch.plamo2_mamba.heads, "heads with a state")
    if arch.delta is not None:
        yield ShardedUnits(arch.delta.key_heads, "key heads with a state")
        yield ShardedUnits(arch.delta.value_heads, "value heads with a state")
    if arch.recurrent_unit is not None:
        yield ShardedUnits(arch.recurrent_unit.heads, "blocks of channels with a state")
    if arch.rwkv7 is not None:
        yield ShardedUnits(arch.hidden_size // arch.rwkv7.head_dim, "heads with a state")
    if arch.short_conv is not None:
        yield ShardedUnits(arch.hidden_size, "channels of its convolutions")


EXECUTORS = ("uni", "null")  # Executors that have one rank, whatever the configuration says.
LAUNCHED = "external_launcher"  # Executor in which each rank plans for itself.


def check_ranks(config: EngineConfig, *, serves: bool, host: Host | None = None) -> None:
    """Check that executor, features and model support the configured ranks.

    Shards in units that only layers know, such as groups of quantized weights, are checked by the layers.

    Raises:
        ConfigError: says what to change, and possible numbers of ranks.
    """
    parallel = config.parallel
    if parallel.distributed_executor_backend == LAUNCHED:
        _check_launched(config, serves=serves)
    if (ranks := parallel.tensor_parallel_size) > 1:
        require(rank_requirements(config), f"--tensor-parallel-size is {ranks}")
    if (stages := parallel.pipeline_parallel_size) > 1:  # "null" only plans
        require(rank_requirements(config, ("uni",)), f"--pipeline-parallel-size is {stages}")
    check_device_ranks(config)
    _check_stages(config)
    _check_shares(config)
    _check_cores(parallel, host or Host())


def rank_requirements(config: EngineConfig, executors: Collection[str] = EXECUTORS) -> dict[str, bool]:
    """Return requirement -> whether it is violated, for several ranks; `executors` have one rank only."""
    executor = config.parallel.distributed_executor_backend
    return {
        f"--distributed-executor-backend mp, not {executor}": executor in executors,
        f"--device cpu or cuda, not {config.device.device}": config.device.device not in ("cpu", "cuda"),
        "no --cpu-pin-threads, which would pin all ranks to the same cores: they have cores of their own with "
        "--cpu-numa auto and --distributed-executor-backend mp, if there are enough": config.device.cpu_pin_threads
        and not _have_cores(config),
    }


def _check_stages(config: EngineConfig) -> None:
    num, sizes = config.parallel.pipeline_parallel_size, config.parallel.stage_sizes
    num_layers = config.arch.num_layers
    if any(size < 1 for size in sizes):
        raise ConfigError(
            f"--pipeline-partition must be such as 3,5, got {config.parallel.pipeline_partition!r}"
        )
    if sizes and (len(sizes), sum(sizes)) != (num, num_layers):
        raise ConfigError(
            f"--pipeline-partition {config.parallel.pipeline_partition} has {len(sizes)} stages with {sum(sizes)} "
            f"layers; --pipeline-parallel-size is {num}, and the model has {num_layers} layers"
        )
    if num > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size is {num}, and the model has {num_layers} layers; each stage has one"
        )


def _check_shares(config: EngineConfig) -> None:
    size = config.parallel.tensor_parallel_size
    found = unshardable_units(config, size)
    if found is not None:
        raise ConfigError(
            f"--tensor-parallel-size is {size}, and the model's {found} cannot be sharded evenly over so many "
            f"ranks; possible: {', '.join(map(str, valid_tp_sizes(config)))}"
        )


def _have_cores(config: EngineConfig) -> bool:
    """Return whether each rank of this host has cores of its own."""
    parallel = config.parallel
    ranks = parallel.num_ranks // parallel.nnodes
    enough = ranks * parallel.num_replicas <= len(Host().cores())
    return enough and config.device.cpu_numa != "off" and parallel.distributed_executor_backend == "mp"


def _check_cores(parallel: ParallelConfig, host: Host) -> None:
    """Warn if ranks share cores, which is correct but slow."""
    ranks, cores = parallel.num_ranks // parallel.nnodes * parallel.num_replicas, len(host.cores())
    if parallel.distributed_executor_backend == "mp" and ranks > max(cores, 1):
        logger.warning(
            "%d ranks are to run on this host, which has %d cores for this process: ranks on one core wait for "
            "each other in every layer; use fewer (--tensor-parallel-size, --pipeline-parallel-size)",
            *(ranks, cores),
        )


def check_hosts(config: EngineConfig, *, headless: bool) -> None:
    """Check that several hosts divide the ranks of `mp` evenly, with the engine on the first.

    Args:
        headless: whether this host has no engine.

    Raises:
        ConfigError: says what to change.
    """
    parallel = config.parallel
    num, node = parallel.nnodes, parallel.node_rank
    brings_replicas = headless and parallel.data_parallel_size > 1
    if num == 1 and not node and headless == brings_replicas:
        return
    size, executor = parallel.num_ranks, parallel.distributed_executor_backend
    wants = {
        f"--node-rank of 0 to {num - 1}, not {node}": node >= num,
        "--headless on all hosts but number 0": headless == (node == 0),
        f"it to divide the ranks, of which --tensor-parallel-size and --pipeline-parallel-size make {size}": size
        % num
        != 0,
        f"--distributed-executor-backend mp, not {executor}": executor != "mp",
        "--data-parallel-size 1": parallel.data_parallel_size > 1,
    }
    for wanted, lacks in wants.items():
        if lacks:
            raise ConfigError(f"--nnodes is {num}, which requires {wanted}")


def _check_launched(config: EngineConfig, *, serves: bool) -> None:
    """Check that ranks that plan for themselves do not depend on local state such as clocks."""
    scheduler = config.scheduler
    ages = scheduler.scheduling_policy == "priority" and scheduler.priority_ageing_s > 0
    wants = {
        "LLM(...), in a program that each rank runs": serves,
        "--data-parallel-size 1": config.parallel.data_parallel_size > 1,
        "--pipeline-parallel-size 1": config.parallel.pipeline_parallel_size > 1,
        "--priority-ageing-s 0: ranks have clocks of their own": ages,
        "--max-mixed-step-s 0: ranks measure times of their own": bool(scheduler.max_mixed_step_s),
    }
    for wanted, lacks in wants.items():
        if lacks:
            raise ConfigError(f"--distributed-executor-backend {LAUNCHED} requires {wanted}")


OPTION = "--enable-expert-parallel"


def check_experts(config: EngineConfig) -> None:
    """Check that each rank has some of the experts, and that replicas sharing them can step together.

    Raises:
        ConfigError: says what to change.
    """
    parallel, experts = config.parallel, config.arch.experts
    if not parallel.enable_expert_parallel:
        return
    if experts is None:
        raise ConfigError(f"{OPTION} shards experts, and {config.arch.architecture} has none")
    count, ranks = experts.count, parallel.num_expert_ranks
    if ranks > count:
        raise ConfigError(
            f"{OPTION} shards {count} experts with at least one per rank, and there are {ranks} ranks: "
            f"--tensor-parallel-size times --data-parallel-size may be {count} at most"
        )
    if parallel.shares_experts:
        _check_replicas(config)


def _check_replicas(config: EngineConfig) -> None:
    parallel = config.parallel
    executor, size = parallel.distributed_executor_backend, parallel.data_parallel_size
    wants = rank_requirements(config) | {
        f"--distributed-executor-backend mp, not {executor}": executor != "mp",
        "--pipeline-parallel-size 1": parallel.pipeline_parallel_size > 1,
        f"no {ENABLE_FLAG}: tokens go to experts without their adapters": config.serves_adapters,
        "all replicas in one server: experts of other servers are not reachable": parallel.num_replicas
        < size,
    }
    require(wants, f"{OPTION} is given and --data-parallel-size is {size}")
