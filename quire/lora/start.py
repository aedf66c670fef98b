# SPDX-License-Identifier: Apache-2.0
"""Start of adapters: their limits are checked."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.start_feature import StartFeature


class LoRAStart(StartFeature):
    """Refuses contradictory limits."""

    def check(self, config: EngineConfig) -> None:
        config.lora.check()
