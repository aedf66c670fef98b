# SPDX-License-Identifier: Apache-2.0
"""Start of structured outputs: the backend is checked without importing it."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.start_feature import StartFeature
from quire.structured_output.backends import check_backend


class GrammarStart(StartFeature):
    """Refuses an unavailable backend."""

    def check(self, config: EngineConfig) -> None:
        check_backend(config.structured_outputs.settings.backend)
