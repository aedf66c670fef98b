# SPDX-License-Identifier: Apache-2.0
"""Device, executor and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.fields import Config, option
from quire.errors import ConfigError


@dataclass(frozen=True)
class DeviceConfig(Config):
    """Device, CPU threads, and CUDA graphs."""

    device: str = option(
        "auto",
        "Device type, or a plug-in's; auto: a GPU if there is one that torch can use, else the CPU. ROCm is cuda.",
        choices=("auto", "cpu", "cuda", "xpu"),
        plugins="quire.devices",
    )
    cpu_threads: int = option(0, "Compute threads; 0: one per available physical core.", ge=0)
    cpu_pin_threads: bool = option(
        False,
        "Keep each compute thread but the first on a core of its own: steadier on a machine that runs nothing else.",
    )
    cpu_numa: str = option(
        "auto",
        "Core binding: auto: each replica and rank has its own, neighboring cores; ranks, replicas: one per NUMA "
        "node; off: none.",
        choices=("auto", "ranks", "replicas", "off"),
    )
    enforce_eager: bool = option(
        False, "Launch every kernel from Python: no CUDA graphs, and no recorded kernel graphs on a CPU."
    )
    cuda_graph_capture: str = option(
        "start",
        "When CUDA graphs are captured: all at start, or each on first use.",
        choices=("start", "lazy"),
    )
    cudagraph_capture_sizes: tuple[int, ...] = option(
        (),
        "Batch sizes, up to --max-num-seqs, with a CUDA graph; default: 1, 2, 4, every 8th to 256, every 16th to 512.",
        metavar="SIZE",
    )
    prefill_graph_sizes: tuple[int, ...] = option(
        (),
        "Tokens, up to --max-num-batched-tokens, of steps with prompts that have CUDA graphs; 0: none; default: every "
        "64th to 512.",
        metavar="SIZE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("cudagraph_capture_sizes", 1), ("prefill_graph_sizes", 0)):
            sizes: tuple[Any, ...] = getattr(self, name)
            bad = [size for size in sizes if type(size) is not int or size < least]
            if bad:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be integers of at least {least}, got {bad[0]!r}")


@dataclass(frozen=True)
class ParallelConfig(Config):
    """Executor, model parallelism over ranks, and data parallel replicas.

    Rank s * `tensor_parallel_size` + i has tensor parallel shard i of stage s.
    """

    distributed_executor_backend: str = option(
        "auto",
        "uni: in the engine's process; mp: a process per rank; ray: as mp, by Ray; external_launcher: torchrun's; "
        "null: no model; or module:Class.",
        choices=("auto", "uni", "mp", "ray", "external_launcher", "null"),
        plugins="quire.executors",
        places=True,
    )
    tensor_parallel_size: int = option(
        1, "Ranks over which each layer is sharded (tensor parallelism).", ge=1, short="-tp"
    )
    pipeline_parallel_size: int = option(
        1, "Pipeline stages, each with consecutive layers and its own ranks.", ge=1, short="-pp"
    )
    pipeline_partition: str | None = option(
        None,
        "Layers per stage, such as 3,5. Default: the partition with the fastest slowest stage, measured at start.",
        metavar="N,N",
    )
    tp_invariant: bool = option(
        False,
        "All-reduce the same four slices whatever --tensor-parallel-size is, so that 1, 2 and 4 give the same bits.",
    )
    enable_expert_parallel: bool = option(
        False, "Distribute whole experts over the ranks of all replicas, instead of sharding each expert."
    )
    nnodes: int = option(
        1,
        "Hosts with the ranks of mp; all need the same options except --node-rank (see parallelism.md).",
        ge=1,
    )
    node_rank: int = option(0, "Number of this host; 0: the one that has the engine.", ge=0)
    master_addr: str = option("127.0.0.1", "Address of host 0, at which the others join it.")
    master_port: int = option(29501, "Port of host 0, at which the others join it.", ge=1, le=65535)
    data_parallel_size: int = option(
        1,
        "Replicas of the model, each an engine core with its ranks, that share the requests (see parallelism.md).",
        ge=1,
        short="-dp",
    )
    routing_policy: str = option(
        "prefix",
        "Routing of requests to replicas: prefix: earliest expected prefill, given the cached prefixes; least_loaded; "
        "or round_robin.",
        choices=("prefix", "least_loaded", "round_robin"),
    )
    data_parallel_size_local: int | None = option(
        None, "Replicas that run here. Default: all; one with --data-parallel-rank, or with Ray.", ge=1
    )
    data_parallel_start_rank: int | None = option(None, "Number of the first replica here. Default: 0.", ge=0)
    data_parallel_rank: int | None = option(
        None, "Number of the one replica here, behind a load balancer of your own.", ge=0
    )
    data_parallel_hybrid_lb: bool = option(
        False, "Each host's server has some of the replicas, behind a load balancer of your own."
    )
    data_parallel_external_lb: bool = option(
        False, "Each replica has a server, behind a load balancer of your own."
    )
    data_parallel_backend: str = option(
        "mp",
        "Launcher of replicas: mp: each host starts its own; ray: Ray places those that do not run here.",
        choices=("mp", "ray"),
    )
    data_parallel_address: str | None = option(
        None,
        "Address of the host with the server, at which replicas of other hosts join it. Default: 127.0.0.1.",
    )
    data_parallel_rpc_port: int | None = option(
        None, "Port of that host for joining replicas. Default: 29550.", ge=1, le=65535
    )

    @property
    def plans_on_each_rank(self) -> bool:
        """True if each rank has a scheduler of its own, which must make the same plans as the others."""
        return self.distributed_executor_backend == "external_launcher"

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_expert_ranks(self) -> int:
        """Ranks of all replicas that share the experts of a layer."""
        return self.tensor_parallel_size * self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def shares_experts(self) -> bool:
        """True if each replica has some of the experts, so that replicas depend on each other."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Layers per stage, if configured; an invalid number is 0."""
        numbers = [] if self.pipeline_partition is None else self.pipeline_partition.split(",")
        return tuple(int(number) if number.strip().isdecimal() else 0 for number in numbers)

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a host."""
        num = self.num_ranks // self.nnodes
        return range(node * num, (node + 1) * num)

    @property
    def num_replicas(self) -> int:
        """Replicas that run here."""
        if self.data_parallel_rank is not None:
            return 1
        by_default = 1 if self.data_parallel_backend == "ray" else self.data_parallel_size
        return self.data_parallel_size_local or by_default

    @property
    def first_replica(self) -> int:
        """Number of the first replica here."""
        if self.data_parallel_rank is not None:
            return self.data_parallel_rank
        return self.data_parallel_start_rank or 0

    @property
    def replicas(self) -> range:
        """Numbers of the replicas here."""
        return range(self.first_replica, self.first_replica + self.num_replicas)

    @property
    def remote_replicas(self) -> range:
        """Numbers of the replicas that other hosts bring to the server here."""
        is_apart = self.data_parallel_rank is not None or self.data_parallel_hybrid_lb
        return range(self.data_parallel_size if is_apart else self.replicas.stop, self.data_parallel_size)

    @property
    def served(self) -> list[int]:
        """Numbers of the replicas behind the server here, in the order of its cores."""
        return [*self.replicas, *self.remote_replicas]

    @property
    def num_served(self) -> int:
        """Number of replicas behind the server here."""
        return self.num_replicas + len(self.remote_replicas)

    @property
    def join_place(self) -> tuple[str, int]:
        """Address and port at which replicas of other hosts join the server."""
        return self.data_parallel_address or "127.0.0.1", self.data_parallel_rpc_port or 29550


@dataclass(frozen=True)
class HostShare:
    """Share of the host's resources for one of several replicas."""

    num_replicas: int
    memory_bytes: int  # Part of the memory that was free before the first replica started.
    processors: tuple[int, ...] = ()  # Processors it is bound to; empty: unbound.
    index: int = 0  # Index among the replicas, which selects its devices.


@dataclass(frozen=True)
class KernelConfig(Config):
    """Choice of kernels."""

    attention_backend: str = option(
        "auto",
        "Attention kernels by name: cpu, triton, torch_sdpa, reference, or a plug-in's; auto: the best that run here.",
        metavar="NAME",
    )
    batch_invariant: bool = option(
        False, "Batch-invariant results on a GPU, at some cost of speed; on a CPU they always are."
    )
    matmul_precision: str = option(
        "auto",
        "auto: medium where that is faster, else highest; medium: on a CPU, activations are rounded to bfloat16 for "
        "bfloat16 weights.",
        choices=("auto", "highest", "medium"),
    )
