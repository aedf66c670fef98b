# SPDX-License-Identifier: Apache-2.0
"""Interface of front-end features that run a request as several core requests, such as a search.

They are found in `quire.features.REQUEST_OWNERS`, by the class of their parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from quire.engine.input_processor import InputProcessor
from quire.engine.messages import CoreRequest, EngineCoreRequest
from quire.engine.output_processor import Sink
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.tokenizer import Tokenizer
from quire.features import REQUEST_OWNERS
from quire.metrics.stats import IterationStats
from quire.plugins import import_place
from quire.scheduler.output import RequestUpdate


class RequestOwner(ABC):
    """Owner of the requests with parameters of one class; updates of other requests are ignored."""

    params_type: ClassVar[type]
    """Class of the parameters."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Upper bound of the sequences that the requests follow."""

    @abstractmethod
    def submit(
        self,
        processor: InputProcessor,
        name: str,
        label: str,
        prompt: TokenizedPrompt,
        params: Any,
        terms: Mapping[str, Any],
        sink: Sink,
        trace_headers: Mapping[str, str] | None = None,
    ) -> tuple[list[str], list[CoreRequest]]:
        """Validate and start a request; return all core ids it will use, and the messages to send.

        Args:
            name: unique name, from which core ids are derived.
            terms: priority, tenant and adapter.

        Raises:
            ValidationError: names the field, its value's problem and the limit.
        """

    @abstractmethod
    def process(
        self, updates: Iterable[RequestUpdate], now: float, stats: IterationStats
    ) -> list[CoreRequest]:
        """Process a core's updates; return the messages to send to it."""

    @abstractmethod
    def end(self, core_ids: Iterable[str], reason: str, now: float, stats: IterationStats) -> list[str]:
        """End the requests of these ids with their current results; return all of their core ids."""

    @abstractmethod
    def resume(self, core_ids: Iterable[str]) -> list[EngineCoreRequest]:
        """Return the core requests with which a restarted core continues the requests."""

    @abstractmethod
    def fail(self, core_ids: Iterable[str], error: Exception, now: float, stats: IterationStats) -> None:
        """End the requests of these ids with this error."""


def request_owners(tokenizer: Tokenizer | None) -> dict[type, RequestOwner]:
    """Return the owners in the table, by the class of their parameters."""
    kinds: list[type[RequestOwner]] = [import_place(place) for place in REQUEST_OWNERS.values()]
    return {kind.params_type: kind(tokenizer) for kind in kinds}
