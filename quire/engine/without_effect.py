# SPDX-License-Identifier: Apache-2.0
"""Options that a configuration makes meaningless, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.config import EngineConfig
from quire.config.engine import engine_fields
from quire.kernels import cpu


def without_effect(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yield the fields of a prepared config that were set without effect, each with the reason."""
    for fields, why in _WITHOUT_EFFECT:
        reason = why(config)
        for field in fields if reason is not None else ():
            child, owner = engine_fields()[field]
            if getattr(getattr(config, child), field) != getattr(owner(), field):
                yield field, str(reason)


def _why_no_graphs(config: EngineConfig) -> str | None:
    if config.device.device == "cpu":
        return "there are no CUDA graphs on a CPU"
    return "--enforce-eager switches CUDA graphs off" if config.device.enforce_eager else None


def _why_one_token(config: EngineConfig) -> str | None:
    steps = config.scheduler.num_scheduler_steps
    return "a plan is of one token of each request (--num-scheduler-steps)" if steps == 1 else None


def _why_no_threads(config: EngineConfig) -> str | None:
    return None if config.device.device == "cpu" else f"the device is {config.device.device}"


def _why_one_replica(config: EngineConfig) -> str | None:
    return "there is one replica here" if config.parallel.num_replicas == 1 else None


def _why_one_process(config: EngineConfig) -> str | None:
    parallel = config.parallel
    is_one = parallel.num_replicas == 1 and parallel.num_ranks == 1
    return "one process computes, wherever the system lets it" if is_one else None


def _why_no_address(config: EngineConfig) -> str | None:
    parallel = config.parallel
    elsewhere = parallel.data_parallel_rank is not None or parallel.data_parallel_hybrid_lb
    joins = parallel.remote_replicas or (parallel.first_replica and not elsewhere)
    return None if joins else "no replica has to find a server on another host"


def _why_all_experts(config: EngineConfig) -> str | None:
    parallel = config.parallel
    has_all = parallel.num_expert_ranks == 1 and not parallel.tp_invariant
    return "one rank has all experts" if has_all else None


def _why_not_kept(config: EngineConfig) -> str | None:
    return None if config.load.enable_packed_weights_cache else "--no-enable-packed-weights-cache"


def _unless_policy(name: str) -> Callable[[EngineConfig], str | None]:
    def why(config: EngineConfig) -> str | None:
        policy = config.scheduler.scheduling_policy
        is_known = policy == name or config.scheduler.scheduler_cls
        return None if is_known else f"--scheduling-policy is {policy}"

    return why


def _why_no_swapping(config: EngineConfig) -> str | None:
    return None if config.cache.swap_space else "there is no --swap-space"


def _why_one_precision(config: EngineConfig) -> str | None:
    dtype = config.model.dtype
    if config.device.device != "cpu" or (dtype == "bfloat16" and cpu.available()):
        return None
    return f"on a CPU {dtype} weights meet activations in float32"


def _why_invariant(config: EngineConfig) -> str | None:
    on_cpu = config.device.device == "cpu"
    return "on a CPU a request has the same bits in every batch anyway" if on_cpu else None


_WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], Callable[[EngineConfig], str | None]], ...] = (
    (("cuda_graph_capture", "cudagraph_capture_sizes", "prefill_graph_sizes"), _why_no_graphs),
    (("cpu_threads", "cpu_pin_threads"), _why_no_threads),
    (("fair_weights", "fair_input_token_weight", "fair_output_token_weight"), _unless_policy("fair")),
    (("max_multi_step_s", "multi_step_streams"), _why_one_token),
    (("priority_ageing_s",), _unless_policy("priority")),
    (("preemption_mode",), _why_no_swapping),
    (("matmul_precision",), _why_one_precision),
    (("batch_invariant",), _why_invariant),
    (("routing_policy",), _why_one_replica),
    (("cpu_numa",), _why_one_process),
    (("enable_expert_parallel",), _why_all_experts),
    (("packed_weights_cache", "packed_weights_cache_gib"), _why_not_kept),
    (("data_parallel_address", "data_parallel_rpc_port"), _why_no_address),
)
"""Fields, with a function that returns why they have no effect; None if they have."""
