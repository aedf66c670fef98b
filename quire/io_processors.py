# SPDX-License-Identifier: Apache-2.0
"""Plug-in interface that converts requests and replies around a pooling model.

Invariant: torch-free; called in the API process, off its event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from quire.config import EngineConfig
from quire.inputs import PromptType
from quire.plugins import PluginTable, subclass_of
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams


class IOProcessor(ABC):
    """Converter of requests and replies; created once per engine and called from several threads."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def prompts(self, data: Any) -> Sequence[PromptType]:
        """Return the prompts to pool for a request with the JSON value `data`.

        Raises:
            ValidationError: the request is invalid; the message is sent to its client.
        """

    def params(self, data: Any) -> PoolingParams:
        """Return the pooling parameters of each prompt. Raises ValidationError as `prompts` does."""
        return PoolingParams()

    @abstractmethod
    def reply(self, data: Any, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> Any:
        """Return the reply, serializable as JSON by msgspec, from the output of each prompt."""


IO_PROCESSORS: PluginTable[type[IOProcessor]] = PluginTable(
    "quire.io_processors", "--io-processor-plugin", {}, subclass_of(IOProcessor)
)


def make_io_processor(config: EngineConfig) -> IOProcessor | None:
    """Return the configured IO processor, if any.

    Raises:
        ConfigError: there is none of that name, or it is no IOProcessor.
    """
    name = config.model.io_processor_plugin
    return None if name is None else IO_PROCESSORS.resolve(name)(config)
