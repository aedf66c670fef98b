"""Whether the experts of a model may be shared out whole, as `--enable-expert-parallel` asks for."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.device_rank_checks import require
from quire.engine.rank_checks import wants_of_ranks
from quire.errors import ConfigError

OPTION = "--enable-expert-parallel"


def check_experts(config: EngineConfig) -> None:
    """Each rank has some of the experts, and replicas that share them can take every step together.

    Raises:
        ConfigError: says what to change.
    """
    parallel, experts = config.parallel, config.arch.experts
    if not parallel.enable_expert_parallel:
        return
    if experts is None:
        raise ConfigError(f"{OPTION} shares out experts, and {config.arch.architecture} has none of ours")
    count, ranks = experts.count, parallel.num_expert_ranks
    if ranks > count:
        raise ConfigError(
            f"{OPTION} shares out {count} experts, of which each rank has one at least, and there are {ranks} ranks: "
            f"--tensor-parallel-size times --data-parallel-size may be {count} at most"
        )
    if parallel.shares_experts:
        _check_replicas(config)


def _check_replicas(config: EngineConfig) -> None:
    parallel = config.parallel
    executor, size = parallel.distributed_executor_backend, parallel.data_parallel_size
    wants = wants_of_ranks(config) | {
        f"--distributed-executor-backend mp, not {executor}": executor != "mp",
        "--pipeline-parallel-size 1": parallel.pipeline_parallel_size > 1,
        "no --enable-lora: tokens go to experts without their adapters": config.lora.enable_lora,
        "all replicas in one server, since those of others are not reached": parallel.num_replicas < size,
    }
    require(wants, f"{OPTION} is given and --data-parallel-size is {size}")
