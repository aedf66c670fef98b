"""What the model runs on."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class DeviceConfig(Config):
    """Device and threads."""

    device: str = option("auto", "Device type.", choices=("auto", "cpu"))
    cpu_threads: int = option(0, "Compute threads; 0: one per available physical core.", ge=0)
    enforce_eager: bool = option(
        False, "Run every step kernel by kernel from Python: no CUDA graphs, and no tapes on a CPU."
    )
