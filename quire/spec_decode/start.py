# SPDX-License-Identifier: Apache-2.0
"""Start of speculative decoding: the method is checked, and the draft model or heads are prepared."""

from __future__ import annotations

import dataclasses

from quire.config import EngineConfig
from quire.engine.start_feature import StartFeature, Usage
from quire.engine.startup import load_tokenizer, prepare
from quire.errors import ConfigError, StartupError
from quire.spec_decode.draft_model import (
    check_draft_model,
    check_draft_source,
    draft_model_config,
    with_draft_heads,
)
from quire.spec_decode.drafter import MODEL_KEYS, check_speculation
from quire.spec_decode.models.reader import HEADS


class DraftingStart(StartFeature):
    """Prepares drafting."""

    def check(self, config: EngineConfig) -> None:
        check_speculation(config)

    def complete(self, config: EngineConfig, usage: Usage) -> EngineConfig:
        """Return the config with its draft model, prepared as any other, or draft heads, if it has any."""
        settings = config.speculative.settings
        if settings.method not in MODEL_KEYS:
            return config
        check_draft_source(config)
        try:
            return with_draft_heads(config) if settings.method in HEADS else _with_draft_model(config, usage)
        except StartupError as error:
            model = settings.model or config.model.model
            raise ConfigError(f"--speculative-config: model {model!r}: {error}") from error


def _with_draft_model(config: EngineConfig, usage: Usage) -> EngineConfig:
    if config.parallel.nnodes > 1:  # a model not sharded is the same on all hosts
        usage = "server"
    found = prepare(draft_model_config(config), usage)
    check_draft_model(config, found, load_tokenizer(config), load_tokenizer(found))
    return dataclasses.replace(config, draft=found)
