"""What one step may hold."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class SchedulerConfig(Config):
    """Limits of a step and the order of requests."""

    max_num_seqs: int = option(0, "Most requests running at once; 0: 128 for a server, 256 offline.", ge=0)
    max_num_batched_tokens: int = option(
        0, "Most tokens in one step; 0: 2048 for a server, 4096 offline.", ge=0, metavar="TOKENS"
    )
    enable_chunked_prefill: bool = option(True, "Split prompts that are longer than a step's token budget.")
    scheduling_policy: str = option("fcfs", "Order in which waiting requests start.", choices=("fcfs",))
    stream_interval: int = option(1, "Tokens that a stream gathers before it sends a chunk.", ge=1)
    async_scheduling: bool = option(False, "Plan and publish steps while others are computed.")
    max_steps_in_flight: int = option(
        0, "Most steps planned before their results are in; 0: 2 with --async-scheduling, else 1.", ge=0
    )
