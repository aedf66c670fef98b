# SPDX-License-Identifier: Apache-2.0
"""Logits processors: code of the operator, or of an offline caller, that changes the logits of single requests.

Invariant: a processor gets the logits of one request at one position, with all preceding tokens. So a request's tokens
depend on the request alone as long as the processor keeps no state of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.plugins import import_subclass
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from quire.config import EngineConfig

FLAG = "--logits-processors"
# (prompt ids, output ids, logits [V] float32) -> logits of the same shape, or None if changed in place
RequestLogitsProcessor = Callable[[list[int], list[int], "Tensor"], "Tensor | None"]


class LogitsProcessor(ABC):
    """Engine-wide logits processor, created once in the process that runs the model.

    Args:
        config: of the engine, with all automatic values resolved.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def for_request(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the callable for a request, applied before each of its tokens; None if it is not concerned.

        `params.extra_args` are the request's arguments for processors. An error ends this request only.
        """


def make_logits_processors(config: EngineConfig) -> list[LogitsProcessor]:
    """Return the processors named by `--logits-processors`.

    Raises:
        ConfigError: one cannot be imported, is no subclass of `LogitsProcessor`, or cannot be created.
    """
    return [_make(place, config) for place in config.model.logits_processors]


def _make(place: str, config: EngineConfig) -> LogitsProcessor:
    made: Callable[[EngineConfig], LogitsProcessor] = import_subclass(place, LogitsProcessor, FLAG)
    try:
        return made(config)
    except Exception as error:
        raise ConfigError(f"{FLAG}: {place} failed: {error!r}") from error
