"""Signs of life that ranks of several hosts leave where all meet: that a process is stopped its own host alone sees.

Invariant: a rank's number grows for as long as its process runs, whatever its program does meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from datetime import timedelta
from math import inf
from typing import Any

import torch.distributed

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENCE_S = 6.0
"""A rank whose number has not grown for so long is stopped, or its host is gone."""

_torch: Any = torch.distributed
"""Whose types do not say what it exports."""


class Beats:
    """Those of one process, and what it has seen of the others.

    Args:
        address, port: of the store where the ranks have met, whoever serves it.
    """

    def __init__(self, rank: int, address: str, port: int) -> None:
        store = _torch.TCPStore(
            address, port, None, False, timedelta(seconds=SILENCE_S), wait_for_workers=False
        )
        self._store = _torch.PrefixStore("quire.beats", store)
        self._is_there = True
        self._seen: dict[int, tuple[int, float]] = {}
        ended = threading.Event()
        self._end = weakref.finalize(self, ended.set)
        args = self._store, rank, ended
        threading.Thread(target=_beat, args=args, name="quire-beats", daemon=True).start()

    def silence_of(self, rank: int) -> float:
        """For how many seconds, as far as this process has looked, another rank has given no sign.

        Without a store, which is as silent as a rank that serves it, nobody gives any.
        """
        number, now = self._number_of(rank), time.monotonic()
        if number is None:
            return inf
        if rank not in self._seen or number != self._seen[rank][0]:
            self._seen[rank] = number, now
        return now - self._seen[rank][1]

    def close(self) -> None:
        """Give no more signs."""
        self._end()

    def _number_of(self, rank: int) -> int | None:
        """Of its last sign; -1 before the first; None: the store does not answer, and is not asked again."""
        if not self._is_there:
            return None
        try:
            return int(self._store.get(str(rank))) if self._store.check([str(rank)]) else -1
        except RuntimeError as error:
            logger.info("no signs of life can be read: %s", str(error).splitlines()[0])
            self._is_there = False
            return None


def _beat(store: Any, rank: int, ended: threading.Event) -> None:
    """Until it has ended, or the store, with which all ranks end."""
    number = time.monotonic_ns()  # another than of an engine that the program had before
    while not ended.is_set():
        number += 1
        try:
            store.set(str(rank), str(number))
        except RuntimeError as error:
            logger.info("rank %d: no more signs of life can be given: %s", rank, str(error).splitlines()[0])
            return
        ended.wait(BEAT_S)
