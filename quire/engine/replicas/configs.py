# SPDX-License-Identifier: Apache-2.0
"""Configurations of an engine's replicas.

Invariant: resolved once, before the first replica starts, so that a replacement has the same configuration.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from quire import private_directories
from quire.config import EngineConfig
from quire.config.device import HostShare, ParallelConfig
from quire.errors import ConfigError, StartupError
from quire.executor.ranks import ray_cluster
from quire.platforms import Core, Host, divide_cores, format_processors, nodes_of

logger = logging.getLogger(__name__)


def replica_configs(
    config: EngineConfig, *, in_process: bool, host: Host | None = None
) -> list[EngineConfig]:
    """Return a configuration for each core of an engine, in order; replicas in this process share its resources."""
    num = config.parallel.num_replicas
    config = replace(config, tells_cache=_routes_by_cache(config))
    if num == 1:
        return [config]
    config = with_meeting_directory(config)
    configs = [config.evolve(data_parallel_rank=number) for number in config.parallel.replicas]
    if in_process:
        if config.device.device != "cpu":
            raise ConfigError(
                f"--data-parallel-size is {num} in one process, which cannot use a device per replica: start the "
                "replicas in processes of their own (quire serve, AsyncLLM)"
            )
        return configs
    host = host or Host()
    memory_bytes = host.available_bytes() // num
    shares = [HostShare(num, memory_bytes, index=index) for index in range(num)]
    if config.device.cpu_numa == "off":
        num_threads = host.num_threads()[0] // num
        return [_with_share(*one, num_threads) for one in zip(configs, shares, strict=True)]
    parts = divide_cores(host.nodes(), num)
    return [_placed(*one, host) for one in zip(configs, parts, shares, strict=True)]


def _routes_by_cache(config: EngineConfig) -> bool:
    """Return whether a router, here or on the host that these replicas join, uses their prefix cache contents."""
    parallel = config.parallel
    is_one_of_several = parallel.data_parallel_size > 1 and parallel.data_parallel_rank is None
    return is_one_of_several and parallel.routing_policy == "prefix" and config.cache.enable_prefix_caching


def with_meeting_directory(config: EngineConfig) -> EngineConfig:
    """Add a new private directory in which replicas that share experts meet; the first that ends removes it.

    Raises:
        StartupError: the machine refuses it.
    """
    if not config.parallel.shares_experts:
        return config
    try:
        # No longer than the names of other directories of sockets.
        return replace(config, meeting=str(private_directories.make("all-")))
    except OSError as error:
        raise StartupError(
            f"replicas cannot create their meeting directory: {error}; check TMPDIR and its free space"
        ) from error


def _placed(config: EngineConfig, cores: list[Core], share: HostShare, host: Host) -> EngineConfig:
    """Return the configuration of a replica on these cores, which gets the memory of their NUMA nodes first."""
    processors = tuple(sorted(cpu for core in cores for cpu in core))
    logger.info(
        "replica %d: processors %s of NUMA node %s, %d MiB of memory",
        config.parallel.first_replica,
        format_processors(processors),
        ", ".join(str(number) for number in nodes_of(cores, host.nodes())),
        share.memory_bytes >> 20,
    )
    num_threads = host.num_threads()[0] * len(cores) // len(host.cores())
    return _with_share(config, replace(share, processors=processors), num_threads)


def _with_share(config: EngineConfig, share: HostShare, num_threads: int) -> EngineConfig:
    """Set a replica's host share, and its threads unless the user has set them."""
    config = replace(config, share=share)
    if config.device.cpu_threads or os.environ.get("OMP_NUM_THREADS"):
        return config
    return config.evolve(cpu_threads=max(num_threads // config.parallel.num_ranks, 1))


def check_replicas(config: EngineConfig, host: Host | None = None, *, usage: str = "server") -> None:
    """Check that the configuration can be divide_cores among replicas, and that remote replicas serve a server.

    Args:
        usage: of the engine: "server", "headless" or "offline".

    Raises:
        ConfigError: names the option, and says what to do.
    """
    parallel = config.parallel
    _check_numbers(config, usage)
    if parallel.data_parallel_backend == "ray":
        _check_ray(config, usage)
    num = parallel.num_replicas
    if num == 1:
        return
    if config.device.device not in ("cpu", "cuda"):
        raise ConfigError(
            f"--data-parallel-size is {num}, which requires --device cpu or cuda, not {config.device.device}"
        )
    if config.device.cpu_pin_threads and config.device.cpu_numa == "off":
        raise ConfigError("--cpu-pin-threads would pin all replicas to the same cores, with --cpu-numa off")
    num_cores = len((host or Host()).cores())
    if num > num_cores and parallel.distributed_executor_backend != "null":
        raise ConfigError(
            f"--data-parallel-size is {num}, and there are cores for {num_cores} replicas; each needs one of its own"
        )


def _check_ray(config: EngineConfig, usage: str) -> None:
    """Check the options of replicas placed by Ray, which run on other hosts than the server."""
    option, parallel = "--data-parallel-backend ray", config.parallel
    if usage == "headless":
        raise ConfigError(f"{option} starts replicas on other hosts by itself; --headless does so by hand")
    if not parallel.remote_replicas:
        raise ConfigError(
            f"{option} leaves nothing to Ray: all replicas of this server run on its host (--data-parallel-size, "
            "--data-parallel-size-local)"
        )
    if config.device.device != "cpu":
        raise ConfigError(f"{option} requires --device cpu, not {config.device.device}")
    if parallel.distributed_executor_backend == "ray":
        raise ConfigError(
            f"{option} places replicas and --distributed-executor-backend ray places ranks: choose one"
        )
    if os.environ.get(ray_cluster.ADDRESS, "") in ("", "local"):
        raise ConfigError(
            f"{option} needs a cluster, and {ray_cluster.ADDRESS} names none; replicas on one host need no Ray"
        )
    ray_cluster.check_installed(option)


def _check_numbers(config: EngineConfig, usage: str) -> None:
    """Check that the options define unambiguously which replicas run here."""
    parallel = config.parallel
    size, local, rank = (
        parallel.data_parallel_size,
        parallel.data_parallel_size_local,
        parallel.data_parallel_rank,
    )
    start = parallel.data_parallel_start_rank
    if parallel.data_parallel_external_lb and rank is None:
        raise ConfigError(
            "--data-parallel-external-lb requires --data-parallel-rank, the number of the replica here"
        )
    if rank is not None:
        others = {
            "--data-parallel-hybrid-lb": parallel.data_parallel_hybrid_lb,
            "--data-parallel-start-rank": start is not None,
            "--data-parallel-size-local": local not in (None, 1),
        }
        for option, is_given in others.items():
            if is_given:
                raise ConfigError(
                    f"--data-parallel-rank names the one replica here, which {option} contradicts"
                )
        if rank >= size:
            raise ConfigError(
                f"--data-parallel-rank is {rank}, and --data-parallel-size {size} counts from 0"
            )
        return
    num, first = parallel.num_replicas, parallel.first_replica
    if first + num > size:
        raise ConfigError(
            f"replicas {first} to {first + num - 1} are to run here (--data-parallel-start-rank, "
            f"--data-parallel-size-local), and --data-parallel-size is {size}"
        )
    if (num < size and not parallel.data_parallel_hybrid_lb) or (size > 1 and usage == "headless"):
        _check_parts(parallel, usage)


def _check_parts(parallel: ParallelConfig, usage: str) -> None:
    """Check that the first replicas run beside the server, and the others on headless hosts."""
    num, first = parallel.num_replicas, parallel.first_replica
    what = f"replicas {first} to {first + num - 1} of {parallel.data_parallel_size}"
    if usage == "offline":
        raise ConfigError(
            f"--data-parallel-size-local is {num} of {parallel.data_parallel_size}: LLM(...) has replicas of its own "
            "host only, a server those of others as well"
        )
    if (usage == "headless") != (first > 0):
        raise ConfigError(
            f"{what} (--data-parallel-size-local, --data-parallel-start-rank) require --headless on all hosts but that "
            "of replica 0, or --data-parallel-hybrid-lb with a load balancer in front"
        )
