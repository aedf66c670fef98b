# SPDX-License-Identifier: Apache-2.0
"""Utility calls of cores that wait for their answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quire.engine.messages import UtilityCall, UtilityResult, numbers_of
from quire.errors import EngineError, ValidationError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _CoreCall:
    core: int
    message: UtilityCall
    answer: Future[Any]


class UtilityCalls:
    """Utility calls by number, each with the future of its answer; cancelled futures are ignored."""

    def __init__(self, front_end: int = 0) -> None:
        self._numbers = numbers_of(front_end)
        self._calls: dict[int, _CoreCall] = {}

    def start(self, core: int, method: str, args: Sequence[Any]) -> tuple[Future[Any], UtilityCall]:
        """Create a call; its future raises `ValidationError` if the core refuses, `EngineError` if it fails."""
        message = UtilityCall(next(self._numbers), method, list(args))
        self._calls[message.call_id] = call = _CoreCall(core, message, Future())
        return call.answer, message

    def unanswered_by(self, core: int) -> list[UtilityCall]:
        """Return the calls that a core has not answered, in order."""
        return [call.message for call in self._calls.values() if call.core == core]

    def answer(self, result: UtilityResult) -> None:
        """Resolve a call's future with a core's answer; an unexpected answer is logged."""
        call = self._calls.pop(result.call_id, None)
        if call is None:
            logger.error("an engine core answers call %d, which is not pending", result.call_id)
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
        """Fail all pending calls."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if call.answer.set_running_or_notify_cancel():
                call.answer.set_exception(error)
