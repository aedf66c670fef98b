"""Logits processors: code of the operator's, or of an offline caller's, that changes the logits of single requests.

Invariant: the logits that a processor is shown are of one request and one place, and it is shown all tokens before that
place; so a request's tokens depend on the request alone as long as the processor keeps no state of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError
from quire.plugins import import_place
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from quire.config import EngineConfig

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


def place_of(processor: Any) -> str:
    """Where a class can be imported from; a text is such a place already.

    Raises:
        ConfigError: it is neither, or stands in a function, where no import finds it.
    """
    if isinstance(processor, str):
        return processor
    if not isinstance(processor, type) or "<locals>" in processor.__qualname__:
        raise ConfigError(
            f"--logits-processors: {processor!r} must be 'module:Class' or a class at the top level of a module"
        )
    return f"{processor.__module__}:{processor.__qualname__}"


def _make(place: str, config: EngineConfig) -> LogitsProcessor:
    made = _resolve(place)
    try:
        return made(config)
    except Exception as error:
        raise ConfigError(f"--logits-processors: {place} failed: {error!r}") from error


def _resolve(place: str) -> type[LogitsProcessor]:
    try:
        found = import_place(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--logits-processors: cannot import {place!r} as module:Class: {error}") from None
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(
            f"--logits-processors: {place!r} is no subclass of quire.logits_processors.LogitsProcessor"
        )
    return found
