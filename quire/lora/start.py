# SPDX-License-Identifier: Apache-2.0
"""Start of adapters: their limits are checked."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.start_feature import StartFeature
from quire.errors import ConfigError


class LoRAStart(StartFeature):
    """Refuses contradictory limits, and rounding that would depend on the number of ranks."""

    def check(self, config: EngineConfig) -> None:
        adapters = config.lora
        adapters.check()
        if config.parallel.tp_invariant and adapters.enable_lora and adapters.lora_dtype == "int8":
            raise ConfigError(
                "--tp-invariant requires another --lora-dtype than int8: each rank would quantize its adapter outputs "
                "by its own maximum"
            )
