# SPDX-License-Identifier: Apache-2.0
"""Scheduling limits and policy; supervision of engine cores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quire.config.fields import Config, option
from quire.errors import ConfigError

# Timeouts that a core may compute without a step: first steps of large models take minutes on small machines.
BUSY_FACTOR = 20


@dataclass(frozen=True)
class SupervisionConfig(Config):
    """Supervision of core processes."""

    on_core_death: str = option(
        "resume",
        "Handling of requests when a core dies: resume: they resume in a new one, with the same tokens as without the "
        "death; error: they fail.",
        choices=("resume", "error"),
    )
    core_heartbeat_timeout: float = option(
        30.0,
        "Seconds without a step and without computing after which a core counts as hung; longer while it computes. "
        "0: no limit.",
        ge=0.0,
    )

    @property
    def longest_step_s(self) -> float | None:
        """Longest duration of a step before any longer one is known; None: unlimited."""
        return BUSY_FACTOR * self.core_heartbeat_timeout or None


@dataclass(frozen=True)
class SchedulerConfig(Config):
    """Limits of a step, limits of the queue and the scheduling policy (see scheduling.md)."""

    max_num_seqs: int = option(
        0,
        "Most requests running at once; 0: 128 for a server, 256 offline, or --max-num-batched-tokens if that is less.",
        ge=0,
    )
    max_num_batched_tokens: int = option(
        0, "Most tokens in one step; 0: 2048 for a server, 4096 offline.", ge=0, metavar="TOKENS"
    )
    enable_chunked_prefill: bool = option(True, "Split prompts that are longer than a step's token budget.")
    long_prefill_token_threshold: int = option(
        0,
        "Most tokens of one prompt in a step while other requests generate; 0: as many as the step takes.",
        ge=0,
        metavar="TOKENS",
    )
    max_mixed_step_s: float | None = option(
        None,
        "Most seconds of a step with prompt tokens, 4 times as many while no request generates; 0: no limit. "
        "Default: 0.25 for a server, 0 offline.",
        ge=0.0,
        metavar="SECONDS",
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of requests: first come first served; by priority (lower first), which waiting raises; or fair "
        "between tenants.",
        choices=("fcfs", "priority", "fair"),
    )
    scheduler_cls: str = option(
        "",
        "Subclass of quire.scheduler.scheduler.Scheduler to use, as module:Class.",
        metavar="MODULE:CLASS",
        places=True,
    )
    priority_ageing_s: float = option(
        30.0,
        "Seconds of waiting that are worth one priority level; 0: no ageing, so low priorities may starve.",
        ge=0.0,
    )
    fair_weights: dict[str, Any] = option(
        {}, "JSON object: tenant -> its share relative to the others' 1 under the fair policy."
    )
    fair_input_token_weight: float = option(1.0, "Cost of a computed prompt token for its tenant.", ge=0.0)
    fair_output_token_weight: float = option(2.0, "Cost of a generated token for its tenant.", gt=0.0)
    max_num_queued_reqs: int = option(
        16384,
        "Most sequences that may be tokenized or wait for their first token before a server answers 503; 0: no limit.",
        ge=0,
    )
    max_num_queued_tokens: int = option(
        0, "Most prompt tokens of these sequences before a server answers 503; 0: no limit.", ge=0
    )
    min_free_memory: int | None = option(
        None,
        "MiB of memory below which a server with requests in flight refuses more (503); default: 3 %, at most 256; "
        "0: never.",
        ge=0,
        metavar="MIB",
    )
    stream_interval: int = option(1, "Tokens that a stream collects per chunk.", ge=1)
    async_scheduling: bool | None = option(
        None, "Plan and publish steps while others are computed; default: on a GPU, and with stages."
    )
    max_steps_in_flight: int = option(
        0,
        "Most steps planned before their results are in; 0: 2 with --async-scheduling, one for each of several stages, "
        "else 1.",
        ge=0,
    )
    num_scheduler_steps: int = option(
        0,
        "Most decode steps per plan while no request waits, within --max-multi-step-s; 0: 16 on a CPU, else 1.",
        ge=0,
    )
    max_multi_step_s: float = option(
        0.0,
        "Most seconds of a plan of several decode steps; 0: 0.02 on a server, 0.5 offline or if "
        "--num-scheduler-steps is given.",
        ge=0.0,
        metavar="SECONDS",
    )
    multi_step_streams: bool | None = option(
        None,
        "Use multi-step decode for streaming requests, too; default: not offline, unless --num-scheduler-steps is "
        "given.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for tenant, weight in self.fair_weights.items():
            if type(weight) not in (int, float) or not 0 < weight < math.inf:
                raise ConfigError(f"--fair-weights must be numbers above 0, got {weight!r} for {tenant!r}")

    def check(self) -> None:
        """Reject contradictory limits, after automatic values are resolved.

        Raises:
            ConfigError: names them.
        """
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, but {self.max_num_seqs} running "
                "sequences (--max-num-seqs) need at least one token each per step"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                "--long-prefill-token-threshold splits prompts, and --no-enable-chunked-prefill forbids that"
            )
        if self.max_mixed_step_s and not self.enable_chunked_prefill:
            raise ConfigError(
                "--max-mixed-step-s splits prompts, and --no-enable-chunked-prefill forbids that"
            )
