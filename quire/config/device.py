"""What the model runs on: device, executor, kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.fields import Config, option
from quire.errors import ConfigError


@dataclass(frozen=True)
class DeviceConfig(Config):
    """Device, threads of a CPU, and CUDA graphs."""

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
        "auto: each replica and rank has cores of its own, near each other; ranks, replicas: and each NUMA node has "
        "one; off: no.",
        choices=("auto", "ranks", "replicas", "off"),
    )
    enforce_eager: bool = option(
        False, "Run every step kernel by kernel from Python: no CUDA graphs, and no tapes on a CPU."
    )
    cuda_graph_capture: str = option(
        "start",
        "When CUDA graphs are captured: all at start, or each when it is first needed.",
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
    """The executor, over how many ranks it spreads a model, and how many replicas of all that there are.

    Rank s * `tensor_parallel_size` + i has share i of the layers of stage s.
    """

    distributed_executor_backend: str = option(
        "auto",
        "uni: in the engine's process; mp: one for each rank; ray: as mp, by Ray; external_launcher: torchrun's; "
        "null: none; or module:Class.",
        choices=("auto", "uni", "mp", "ray", "external_launcher", "null"),
        plugins="quire.executors",
        places=True,
    )
    tensor_parallel_size: int = option(
        1, "Ranks that share the heads and features of each layer.", ge=1, short="-tp"
    )
    pipeline_parallel_size: int = option(
        1, "Stages of neighbouring layers, each with its ranks, that follow one another.", ge=1, short="-pp"
    )
    pipeline_partition: str | None = option(
        None,
        "Layers of each stage, such as 3,5. Default: as many as make the slowest one fastest, by measuring at start.",
        metavar="N,N",
    )
    tp_invariant: bool = option(
        False,
        "Form sums that cross ranks of the same four slices whatever --tensor-parallel-size is: 1, 2 and 4 give the "
        "same bits.",
    )
    enable_expert_parallel: bool = option(
        False,
        "Share out the experts of sparse layers whole, among the ranks of all replicas, instead of features of each.",
    )
    nnodes: int = option(
        1,
        "Hosts that share the ranks of mp, all with the same options but --node-rank (see parallelism.md).",
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
        "Which replica gets a request: prefix: where it is computed first, going by what is cached; least_loaded; or "
        "round_robin.",
        choices=("prefix", "least_loaded", "round_robin"),
    )
    data_parallel_size_local: int | None = option(
        None,
        "Of the replicas, those that run here. Default: all; one with --data-parallel-rank, or with Ray.",
        ge=1,
    )
    data_parallel_start_rank: int | None = option(None, "Number of the first replica here. Default: 0.", ge=0)
    data_parallel_rank: int | None = option(
        None, "Number of the one replica here, behind a load balancer of your own.", ge=0
    )
    data_parallel_hybrid_lb: bool = option(
        False,
        "Each host's server has a part of the replicas, and a load balancer of your own is before them.",
    )
    data_parallel_external_lb: bool = option(
        False, "Each replica has a server, and a load balancer of your own is before them."
    )
    data_parallel_backend: str = option(
        "mp",
        "Who starts replicas: mp: each host its own; ray: Ray those that do not run here, where it has room.",
        choices=("mp", "ray"),
    )
    data_parallel_address: str | None = option(
        None,
        "Address of the host with the server, at which replicas of other hosts join it. Default: 127.0.0.1.",
    )
    data_parallel_rpc_port: int | None = option(
        None, "Port of that host, at which they do. Default: 29550.", ge=1, le=65535
    )

    @property
    def plans_on_each_rank(self) -> bool:
        """Whether each rank has a scheduler of its own, which must plan what those of the others plan."""
        return self.distributed_executor_backend == "external_launcher"

    @property
    def num_ranks(self) -> int:
        """Of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_expert_ranks(self) -> int:
        """Those among whom the experts of a layer are shared out, of all replicas."""
        return self.tensor_parallel_size * self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def shares_experts(self) -> bool:
        """Whether replicas need each other, as each has some of the experts."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Layers of each stage, if it is said; a number that is none is 0."""
        numbers = [] if self.pipeline_partition is None else self.pipeline_partition.split(",")
        return tuple(int(number) if number.strip().isdecimal() else 0 for number in numbers)

    def ranks_of(self, node: int) -> range:
        """The ranks of one of the hosts."""
        num = self.num_ranks // self.nnodes
        return range(node * num, (node + 1) * num)

    @property
    def num_replicas(self) -> int:
        """Those that run here."""
        if self.data_parallel_rank is not None:
            return 1
        by_default = 1 if self.data_parallel_backend == "ray" else self.data_parallel_size
        return self.data_parallel_size_local or by_default

    @property
    def first_replica(self) -> int:
        """The number of the first of them."""
        if self.data_parallel_rank is not None:
            return self.data_parallel_rank
        return self.data_parallel_start_rank or 0

    @property
    def replicas(self) -> range:
        """The numbers of those that run here."""
        return range(self.first_replica, self.first_replica + self.num_replicas)

    @property
    def guests(self) -> range:
        """The numbers of those that other hosts bring to the server here."""
        is_apart = self.data_parallel_rank is not None or self.data_parallel_hybrid_lb
        return range(self.data_parallel_size if is_apart else self.replicas.stop, self.data_parallel_size)

    @property
    def served(self) -> list[int]:
        """The numbers of the replicas behind a server here, in the order of its cores."""
        return [*self.replicas, *self.guests]

    @property
    def num_served(self) -> int:
        """How many they are."""
        return self.num_replicas + len(self.guests)

    @property
    def join_place(self) -> tuple[str, int]:
        """Where replicas of other hosts join the server."""
        return self.data_parallel_address or "127.0.0.1", self.data_parallel_rpc_port or 29550


@dataclass(frozen=True)
class HostShare:
    """What one of several replicas may take of their host."""

    num_replicas: int
    memory_bytes: int
    """Of what was free before the first of them started."""
    processors: tuple[int, ...] = ()
    """That it keeps to; none: it may run anywhere."""
    index: int = 0
    """Which of them it is, and so which devices it has."""


@dataclass(frozen=True)
class KernelConfig(Config):
    """Choice of kernels."""

    attention_backend: str = option(
        "auto",
        "Attention kernels by name: cpu, triton, torch_sdpa, reference, or a plug-in's; auto: the best that run here.",
        metavar="NAME",
    )
    batch_invariant: bool = option(
        False,
        "Give a request the same bits in every batch on a GPU too, where that costs speed; on a CPU it is always so.",
    )
    matmul_precision: str = option(
        "auto",
        "auto: medium where that is faster, else highest; medium: on a CPU activations that meet bfloat16 weights are "
        "rounded to it.",
        choices=("auto", "highest", "medium"),
    )
