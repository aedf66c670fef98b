# SPDX-License-Identifier: Apache-2.0
"""Start of a pooling model: runner, conversion and pooling are resolved from the checkpoint's files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from quire.config import EngineConfig
from quire.engine.start_feature import AutomaticValue, Resolution, StartFeature
from quire.pooling.models.resolve import ResolvedPooling, resolve_pooling

logger = logging.getLogger(__name__)


class PoolingStart(StartFeature):
    """Resolves what a model does."""

    def resolve(self, config: EngineConfig, id_of: Callable[[str], int | None]) -> Resolution:
        found = resolve_pooling(config, id_of)
        if found.spec is None:
            return Resolution(choices=[*_choices(config, found)], max_seq_length=found.max_seq_length)
        logger.info("pooling = %s: %s", found.spec.pooling, found.pooling_reason)
        changes = {"pooling": found.spec, "model_arch": found.arch}
        return Resolution(changes, [*_choices(config, found)], found.max_seq_length)


def _choices(config: EngineConfig, found: ResolvedPooling) -> Iterator[AutomaticValue]:
    """Choose the runner; disable prefix caching where a pooling needs every token to be computed."""
    if config.model.runner == "auto":
        yield AutomaticValue("runner", found.runner, found.runner_reason)
    if found.spec is None:
        return
    if config.model.convert != found.convert:
        yield AutomaticValue("convert", found.convert, found.convert_reason)
    if found.spec.always_reads_every_token and config.cache.enable_prefix_caching:
        reason = f"pooling {found.spec.pooling!r} needs every token of a prompt to be computed"
        yield AutomaticValue("enable_prefix_caching", False, reason)
