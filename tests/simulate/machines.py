# SPDX-License-Identifier: Apache-2.0
"""A small machine whose step costs are known."""

from __future__ import annotations

from typing import Any

from quire.config import EngineConfig
from quire.engine.trace import Frame, Trace, TraceHeader, recorded
from quire.kv_cache.spec import encode_kv_config
from quire.simulate.costs import PlanCosts
from quire.simulate.machine import Machine
from quire.simulate.simulator import Simulator
from tests.scheduler.harness import make_config, make_kv_config

COSTS = PlanCosts(
    plan_s=0.0005,
    request_s=0.0003,
    pass_s=0.01,
    sample_s=0.001,
    row_to_4_s=0.0001,
    row_to_8_s=0.0001,
    row_to_16_s=0.0002,
    row_to_32_s=0.0003,
    row_to_64_s=0.0004,
    row_s=0.0002,
    position_s=1e-6,
    prompt_position_s=5e-7,
)


def make_machine(costs: PlanCosts = COSTS, **changes: Any) -> Machine:
    """Return a machine of 4 rows, 16 tokens a step and 64 blocks of 4 tokens, with one pass per plan."""
    config = make_config(
        **{"num_scheduler_steps": 1, "max_steps_in_flight": 1, "async_scheduling": False, **changes}
    )
    return Machine("tiny", costs, config, encode_kv_config(make_kv_config(config)))


def make_simulator(machine: Machine, concurrency: int = 0) -> Simulator:
    return Simulator(machine.config, machine.cache, machine.costs, concurrency)


class RecordingSimulator(Simulator):
    """Simulator whose scheduler is recorded, as `--record-trace` does."""

    def __init__(self, config: EngineConfig, machine: Machine) -> None:
        super().__init__(config, machine.cache, machine.costs)
        self.frames: list[Frame] = []
        self._scheduler = recorded(self._scheduler, self)
        self._loop._scheduler = self._scheduler  # type: ignore[attr-defined]
        self._header = TraceHeader(config, machine.kv_config)

    def write(self, frame: Frame) -> None:
        """Implement `FrameSink`."""
        self.frames.append(frame)

    @property
    def trace(self) -> Trace:
        return Trace(self._header, self.frames, 0)
