# SPDX-License-Identifier: Apache-2.0
"""Machine files: a model's resolved configuration, its KV cache and the step costs of one machine, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine.trace import Trace
from quire.errors import ConfigError
from quire.kv_cache.spec import KVCacheConfig, decode_kv_config, encode_kv_config
from quire.simulate.costs import PlanCosts, fit_costs, measured_steps

MACHINE_VERSION = 3


class Machine(msgspec.Struct, frozen=True):
    """Everything that a simulation needs of a real engine.

    Args:
        model: the model's name.
        costs: of its steps.
        config: resolved configuration of the engine.
        kv_config: plain data of its KV cache.
        front_end_s: time of a request outside the core until its first token.
    """

    model: str
    costs: PlanCosts
    config: EngineConfig
    kv_config: dict[str, Any]
    front_end_s: float = 0.0
    version: int = MACHINE_VERSION

    @property
    def cache(self) -> KVCacheConfig:
        """KV cache of the engine.

        Raises:
            ConfigError: the file is of another version.
        """
        return decode_kv_config(self.kv_config)


class _MachineVersion(msgspec.Struct):
    version: int = 0


def machine_of(trace: Trace) -> Machine:
    """Return the machine of a recorded run.

    Raises:
        ConfigError: the run has too few steps, or an engine that is not simulated.
    """
    config, kv_config = trace.header.config, trace.header.kv_config
    check_simulated(config)
    costs = fit_costs(measured_steps(trace))
    return Machine(config.model.model, costs, config, encode_kv_config(decode_kv_config(kv_config)))


def check_simulated(config: EngineConfig) -> None:
    """Reject engines whose steps depend on more than a plan's tokens.

    Raises:
        ConfigError: names the option.
    """
    if config.speculative.settings.num_lookahead_tokens:
        raise ConfigError("--speculative-config: accepted drafts depend on texts, which are not simulated")
    if config.pooling is not None:
        raise ConfigError(f"{config.model.model} is a pooling model; only models that generate are simulated")
    if config.scheduler.scheduler_cls:
        raise ConfigError("--scheduler-cls: schedulers from outside are not simulated")


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(machine)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_machine(path: Path) -> Machine:
    """Read a machine file.

    Raises:
        ConfigError: the file cannot be read, is no machine file, or is one of another version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        version = msgspec.json.decode(data, type=_MachineVersion).version
        if version != MACHINE_VERSION:
            raise ConfigError(
                f"{path} is a machine file of version {version}, not {MACHINE_VERSION}; calibrate again"
            )
        return msgspec.json.decode(data, type=Machine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no machine file of `quire simulate calibrate`: {error}") from None
