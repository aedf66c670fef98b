"""`FreeMemory`: refuses new work before the machine, or the container, has no memory left.

Invariant: it decides from a reading and the time, both given to it, and reads at most every `READ_EVERY_S`. Who asks
it only while something is in flight cannot refuse for ever: what is in flight ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.errors import MemoryShortError

MIB = 2**20
READ_EVERY_S = 0.25
MOST_KEPT_BYTES = 256 * MIB
KEPT_SHARE = 0.03


class FreeMemory:
    """What is to stay free.

    Args:
        kept_bytes: 0: nothing, and nothing is read.
        read_bytes: what is left; an OSError (no file descriptor, say) leaves the last reading.
        clock: monotonic seconds.
    """

    def __init__(
        self, kept_bytes: int, read_bytes: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept_bytes = kept_bytes
        self._read_bytes = read_bytes
        self._clock = clock
        self._left_bytes = kept_bytes
        self._next_reading = -math.inf

    def check(self) -> None:
        """Whether more may come in.

        Raises:
            MemoryShortError: not now; with the numbers.
        """
        if not self._kept_bytes:
            return
        self._refresh()
        if self._left_bytes < self._kept_bytes:
            raise MemoryShortError(
                f"memory is short: {self._left_bytes / MIB:.0f} MiB are left, and requests are in flight; new ones are "
                f"taken from {self._kept_bytes / MIB:.0f} MiB on; try again later"
            )

    def _refresh(self) -> None:
        now = self._clock()
        if now < self._next_reading:
            return
        self._next_reading = now + READ_EVERY_S
        try:
            self._left_bytes = self._read_bytes()
        except OSError:  # what was known is the best guess, and refusing for want of a number would be worse
            return


def bytes_to_keep(asked_mib: int | None, total_bytes: int) -> int:
    """What `--min-free-memory` says, else a share of all memory that requests can do without on a small machine."""
    return min(MOST_KEPT_BYTES, int(KEPT_SHARE * total_bytes)) if asked_mib is None else asked_mib * MIB
