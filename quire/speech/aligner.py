# SPDX-License-Identifier: Apache-2.0
"""Times of words on the engine core: cross-attention of finished windows, computed in slices between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import msgspec

from quire.config import EngineConfig
from quire.engine.core_feature import CoreFeature
from quire.engine.step_loop import Clock
from quire.errors import UnavailableError
from quire.executor.base import Executor
from quire.media import MediaItem
from quire.plugins import import_place
from quire.scheduler.output import RequestUpdate
from quire.scheduler.scheduler import Scheduler
from quire.speech.alignment import UTILITY, Alignment, AlignmentWeights, pack
from quire.speech.vocabulary import hears

WORK = "quire.speech.cross_attention:start"
MAX_WAITING = 1024


class _Waiting(NamedTuple):
    work: Any
    answer: Future[AlignmentWeights]


class WordAligner(CoreFeature):
    """Alignments of one core, in the order of arrival; a slice of the first is computed before each step."""

    def __init__(self, config: EngineConfig, executor: Executor, scheduler: Scheduler, clock: Clock) -> None:
        super().__init__(config, executor, scheduler, clock)
        self._waiting = deque[_Waiting]()

    @staticmethod
    def is_wanted(config: EngineConfig) -> bool:
        return hears(config)

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {UTILITY: self.align}

    def align(self, alignment: Any, item: Any) -> Future[AlignmentWeights]:
        """Return the weights of an `Alignment`, as builtins or not, when they are computed.

        Raises:
            UnavailableError: too many are waiting.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise UnavailableError("too many words wait for their times", retry_after=2)
        asked, sound = msgspec.convert(alignment, Alignment), msgspec.convert(item, MediaItem)
        answer: Future[AlignmentWeights] = Future()
        self._waiting.append(_Waiting(import_place(WORK)(asked, sound), answer))
        return answer

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) and not self._scheduler.is_paused

    def advance(self) -> list[RequestUpdate]:
        """Compute a slice; an error is that of its call alone."""
        if not self.has_work:
            return []
        work, answer = self._waiting[0]
        try:
            self._executor.run_on_worker(partial(_advance, work))
        except Exception as error:
            answer.set_exception(error)
        else:
            if work.weights is not None:
                answer.set_result(pack(work.weights))
        if answer.done():
            self._waiting.popleft()
        return []


def _advance(work: Any, worker: Any) -> None:
    work.advance(worker)
