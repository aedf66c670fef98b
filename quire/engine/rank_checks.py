"""Whether a model may be computed by as many ranks as the configuration says, found out before any is started."""

from __future__ import annotations

import logging
from collections.abc import Collection

from quire.config import EngineConfig, ParallelConfig
from quire.engine.device_rank_checks import check_device_ranks, require
from quire.engine.shares import possible_sizes, uneven
from quire.errors import ConfigError
from quire.platforms import Host

logger = logging.getLogger(__name__)

EXECUTORS = ("uni", "null")
"""Those that have one rank, whatever the configuration says."""
LAUNCHED = "external_launcher"
"""The one of which each rank plans for itself."""


def check_ranks(config: EngineConfig, *, serves: bool, host: Host | None = None) -> None:
    """Several ranks are for executors that have them, for what works with them, and for models that can be cut so.

    What is cut in units that only layers know, such as groups of quantised weights, is checked by these.

    Raises:
        ConfigError: says what to change, and, if it is the number, which could be.
    """
    parallel = config.parallel
    if parallel.tp_invariant and config.lora.enable_lora and config.lora.lora_dtype == "int8":
        raise ConfigError(
            "--tp-invariant wants another --lora-dtype than int8: each rank would round its outputs of an adapter by "
            "the largest of them"
        )
    if parallel.distributed_executor_backend == LAUNCHED:
        _check_launched(config, serves=serves)
    if (ranks := parallel.tensor_parallel_size) > 1:
        require(wants_of_ranks(config), f"--tensor-parallel-size is {ranks}")
    if (stages := parallel.pipeline_parallel_size) > 1:  # to "null" plans are all there is
        require(wants_of_ranks(config, ("uni",)), f"--pipeline-parallel-size is {stages}")
    check_device_ranks(config)
    _check_stages(config)
    _check_shares(config)
    _check_cores(parallel, host or Host())


def wants_of_ranks(config: EngineConfig, executors: Collection[str] = EXECUTORS) -> dict[str, bool]:
    """What several ranks want -> whether it is not so; these executors have one only."""
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
    found = uneven(config, size)
    if found is not None:
        raise ConfigError(
            f"--tensor-parallel-size is {size}, and the model's {found} cannot be shared out evenly among so many "
            f"ranks; possible: {', '.join(map(str, possible_sizes(config)))}"
        )


def _have_cores(config: EngineConfig) -> bool:
    """Whether each rank of this host keeps to cores of its own."""
    parallel = config.parallel
    ranks = parallel.num_ranks // parallel.nnodes
    enough = ranks * parallel.num_replicas <= len(Host().cores())
    return enough and config.device.cpu_numa != "off" and parallel.distributed_executor_backend == "mp"


def _check_cores(parallel: ParallelConfig, host: Host) -> None:
    """Ranks that have no core to themselves are right and slow."""
    ranks, cores = parallel.num_ranks // parallel.nnodes * parallel.num_replicas, len(host.cores())
    if parallel.distributed_executor_backend == "mp" and ranks > max(cores, 1):
        logger.warning(
            "%d ranks are to run on this host, which has %d cores for this process: those that share one wait for "
            "each other in every layer; fewer are faster (--tensor-parallel-size, --pipeline-parallel-size)",
            *(ranks, cores),
        )


def check_hosts(config: EngineConfig, *, headless: bool) -> None:
    """Several hosts share the ranks of `mp` evenly, and the first one has the engine.

    Args:
        headless: whether this one has none.

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
            raise ConfigError(f"--nnodes is {num}, which wants {wanted}")


def _check_launched(config: EngineConfig, *, serves: bool) -> None:
    """Ranks that plan for themselves may not do so by what differs between them, such as time."""
    scheduler = config.scheduler
    ages = scheduler.scheduling_policy == "priority" and scheduler.priority_ageing_s > 0
    wants = {
        "LLM(...), in a program that each rank runs": serves,
        "--data-parallel-size 1": config.parallel.data_parallel_size > 1,
        "--pipeline-parallel-size 1": config.parallel.pipeline_parallel_size > 1,
        "--priority-ageing-s 0: ranks have clocks of their own": ages,
    }
    for wanted, lacks in wants.items():
        if lacks:
            raise ConfigError(f"--distributed-executor-backend {LAUNCHED} wants {wanted}")
