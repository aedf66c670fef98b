"""Logits processors: code of the operator's, or of an offline caller's, that changes the logits of single requests.

Invariant: the logits that a processor is shown are of one request and one place, and it is shown all tokens before that
place; so a request's tokens depend on the request alone as long as the processor keeps no state of its own.
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
RequestLogitsProcessor = Callable[[list[int], list[int], "Tensor"], "Tensor | None"]
"""(prompt ids, output ids, logits [V] float32) -> logits of the same shape, or None: they were changed in place."""


class LogitsProcessor(ABC):
    """A processor of the whole engine, made once in the process that runs the model.

    Args:
        config: of the engine, with all values settled.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def for_request(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """What is to be called for a request before each of its tokens; None if it does not concern it.

        `params.extra_args` is what the request says to processors. An error ends the request, and it alone.
        """


def make_logits_processors(config: EngineConfig) -> list[LogitsProcessor]:
    """The processors that `--logits-processors` names.

    Raises:
        ConfigError: one cannot be imported, is no subclass of `LogitsProcessor`, or cannot be made.
    """
    return [_make(place, config) for place in config.model.logits_processors]


def _make(place: str, config: EngineConfig) -> LogitsProcessor:
    made: Callable[[EngineConfig], LogitsProcessor] = import_subclass(place, LogitsProcessor, FLAG)
    try:
        return made(config)
    except Exception as error:
        raise ConfigError(f"{FLAG}: {place} failed: {error!r}") from error
