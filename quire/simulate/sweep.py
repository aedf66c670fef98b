# SPDX-License-Identifier: Apache-2.0
"""Simulations of one load for several values of one option."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.config.scheduler import SchedulerConfig
from quire.errors import ConfigError
from quire.kv_cache.spec import KVCacheConfig
from quire.simulate.load import LoadDescription, SimulatedRequest
from quire.simulate.machine import Machine
from quire.simulate.simulator import SimulatedRun, Simulator

SCHEDULER_OPTIONS = tuple(
    field.name
    for field in dataclasses.fields(SchedulerConfig)
    if field.name
    not in (
        "scheduler_cls",
        "stream_interval",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "min_free_memory",
    )
)
"""Options that only decide how the same steps are planned."""
RESOLVED = ("max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight", "num_scheduler_steps")
"""Options whose 0 is an automatic value of the engine."""
CACHE_OPTIONS = ("enable_prefix_caching", "num_gpu_blocks_override", "kv_cache_memory_bytes")
LOAD_OPTIONS = tuple(field.name for field in dataclasses.fields(LoadDescription))
OPTIONS = (*SCHEDULER_OPTIONS, *CACHE_OPTIONS, *LOAD_OPTIONS, "concurrency")


@dataclass(frozen=True)
class Scenario:
    """One simulation: an engine and a load.

    Args:
        load: its description, or the requests themselves.
        concurrency: most requests in flight; 0: no limit.
    """

    config: EngineConfig
    cache: KVCacheConfig
    load: LoadDescription | Sequence[SimulatedRequest]
    concurrency: int = 0
    name: str = "as calibrated"

    @staticmethod
    def from_machine(
        machine: Machine, load: LoadDescription | Sequence[SimulatedRequest], concurrency: int = 0
    ) -> Scenario:
        """Return the scenario of the calibrated engine itself."""
        if concurrency < 0:
            raise ConfigError(f"--concurrency must be at least 0, got {concurrency}")
        return Scenario(machine.config, machine.cache, load, concurrency)

    def with_option(self, name: str, text: str) -> Scenario:
        """Return this scenario with another value of an option.

        Raises:
            ConfigError: there is no such option, or it has no such value.
        """
        name = name.removeprefix("--").replace("-", "_")
        changed = dataclasses.replace(self, name=f"{name}={text}")
        if name in SCHEDULER_OPTIONS:
            return changed._with_scheduler(name, _parse(SchedulerConfig, name, text))
        if name in CACHE_OPTIONS:
            return changed._with_cache(name, text)
        if name == "concurrency":
            return dataclasses.replace(changed, concurrency=_convert(int, name, text, least=0))
        if name in LOAD_OPTIONS:
            if not isinstance(self.load, LoadDescription):
                raise ConfigError(
                    f"--vary {name}: this load is given by a file, which says its requests itself"
                )
            value = _parse(LoadDescription, name, text)
            return dataclasses.replace(changed, load=dataclasses.replace(self.load, **{name: value}))
        raise ConfigError(f"--vary {name}: a simulation can vary {', '.join(OPTIONS)}")

    def run(self, machine: Machine) -> SimulatedRun:
        """Simulate it with a machine's step costs."""
        load = self.load.requests() if isinstance(self.load, LoadDescription) else self.load
        simulator = Simulator(self.config, self.cache, machine.costs, self.concurrency, machine.front_end_s)
        return simulator.run(load)

    def _with_scheduler(self, name: str, value: Any) -> Scenario:
        scheduler = dataclasses.replace(self.config.scheduler, **{name: value})
        if any(getattr(scheduler, each) < 1 for each in RESOLVED):
            raise ConfigError(
                f"--vary {name}: must be at least 1; automatic values were resolved at the calibration"
            )
        if scheduler.async_scheduling and scheduler.num_scheduler_steps > 1:
            raise ConfigError(
                f"--vary {name}: plans of several steps (num_scheduler_steps) are not made ahead (async_scheduling)"
            )
        scheduler.check()
        return dataclasses.replace(self, config=dataclasses.replace(self.config, scheduler=scheduler))

    def _with_cache(self, name: str, text: str) -> Scenario:
        if name == "enable_prefix_caching":
            enabled = _convert(bool, name, text)
            cache = dataclasses.replace(self.config.cache, enable_prefix_caching=enabled)
            return dataclasses.replace(self, config=dataclasses.replace(self.config, cache=cache))
        number = _convert(int, name, text, least=2)
        if name == "kv_cache_memory_bytes":
            number //= max(self.cache.bytes // self.cache.num_blocks, 1)
        if number < 2:
            raise ConfigError(f"--vary {name}: {text} is too little for 2 blocks of the KV cache")
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, num_blocks=number))


def sweep(scenario: Scenario, option: str, values: Sequence[str]) -> Iterator[Scenario]:
    """Yield a scenario for each value of an option; raises ConfigError as `Scenario.with_option` does."""
    for value in values:
        yield scenario.with_option(option, value)


def _parse(kind: type, name: str, text: str) -> Any:
    return _convert(typing.get_type_hints(kind)[name], name, text)


def _convert(kind: Any, name: str, text: str, least: int | None = None) -> Any:
    value: Any = text
    if kind is bool or kind == bool | None:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    elif kind == dict[str, Any]:
        raise ConfigError(f"--vary {name}: JSON objects cannot be varied")
    try:
        converted = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--vary {name}: {text!r}: {error}") from None
    if least is not None and converted < least:
        raise ConfigError(f"--vary {name} must be at least {least}, got {text}")
    return converted
