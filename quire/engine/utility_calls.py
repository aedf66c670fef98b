"""`UtilityCalls`: calls of the cores' utilities that have no answer yet.

Invariant: a call is here from when it is made until its answer, or the engine's end, has been put into its future.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quire.engine.core_ids import numbers_of
from quire.engine.messages import UtilityCall, UtilityResult
from quire.errors import EngineError, ValidationError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Call:
    core: int
    message: UtilityCall
    answer: Future[Any]


class UtilityCalls:
    """Gives each call a number and each answer to the one who waits for it; a future that was cancelled is fine."""

    def __init__(self, front_end: int = 0) -> None:
        self._numbers = numbers_of(front_end)
        self._calls: dict[int, _Call] = {}

    def start(self, core: int, method: str, args: Sequence[Any]) -> tuple[Future[Any], UtilityCall]:
        """A new call; its future's error is a `ValidationError` if the core refuses, an `EngineError` if it fails."""
        message = UtilityCall(next(self._numbers), method, list(args))
        self._calls[message.call_id] = call = _Call(core, message, Future())
        return call.answer, message

    def owed_by(self, core: int) -> list[UtilityCall]:
        """The calls that a core has not answered, in order."""
        return [call.message for call in self._calls.values() if call.core == core]

    def answer(self, result: UtilityResult) -> None:
        """Hand a core's answer over; one to no call costs a line in the log."""
        call = self._calls.pop(result.call_id, None)
        if call is None:
            logger.error("an engine core answers call %d, which waits for no answer", result.call_id)
            return
        answer = call.answer
        if not answer.set_running_or_notify_cancel():
            return
        if result.error is not None:
            kind = ValidationError if result.refused else EngineError
            answer.set_exception(kind(result.error))
        else:
            answer.set_result(result.result)

    def fail_all(self, error: Exception) -> None:
        """There will be no answers any more."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if call.answer.set_running_or_notify_cancel():
                call.answer.set_exception(error)
