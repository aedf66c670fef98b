"""`IOProcessor`: a request and a reply of another form around what a model pools, from a package of its own.

Invariant: torch-free; called in the process that serves, off its event loop.
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
    """Made once for an engine; several threads may call it at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def prompts(self, data: Any) -> Sequence[PromptType]:
        """What is to be pooled for a request, of which `data` is the JSON value.

        Raises:
            ValidationError: the request is wrong; its client is told why.
        """

    def params(self, data: Any) -> PoolingParams:
        """What is wanted of each prompt. Raises ValidationError as `prompts` does."""
        return PoolingParams()

    @abstractmethod
    def reply(self, data: Any, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> Any:
        """The answer, which msgspec can write as JSON, from the output of each prompt."""


IO_PROCESSORS: PluginTable[type[IOProcessor]] = PluginTable(
    "quire.io_processors", "--io-processor-plugin", {}, subclass_of(IOProcessor)
)


def make_io_processor(config: EngineConfig) -> IOProcessor | None:
    """The one that the configuration names.

    Raises:
        ConfigError: there is none of that name, or it is no IOProcessor.
    """
    name = config.model.io_processor_plugin
    return None if name is None else IO_PROCESSORS.resolve(name)(config)
