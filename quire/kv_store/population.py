# SPDX-License-Identifier: Apache-2.0
"""Pages for memory before rows arrive in it.

The first write to a page costs a fault of this system, and on a virtual machine one of its host as well: 0.3 to 5 ms a
MB, several times what reading a row from a disk takes. So an engine that loads rows populates the blocks that the pools
give out first, of the cache and of the host tier, on a thread. These are bytes that the memory plan
has counted, and contents stay.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor

from quire.kernels.cpu.arena import HUGE_PAGE
from quire.platforms import Host

logger = logging.getLogger(__name__)

MOST_BYTES = 2**30
"""Most bytes of an engine, and no more than MOST_SHARE of what the machine has left."""
MOST_SHARE = 0.125
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_URGENT_BYTES = 2**27
"""Bytes that are populated at the priority of the process, and so ahead of most first requests; then steps go first."""
_NICENESS = 10


class Population:
    """Populates the first blocks of tensors [blocks, bytes], which stay allocated until `stop`.

    Tensors without a whole huge page are left alone.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int) -> None:
        self._parts = [tensor[:num_blocks] for tensor in tensors if tensor.nbytes >= HUGE_PAGE]
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-populate", daemon=True)
        if self._parts and sys.platform == "linux":
            self._thread.start()

    def wait(self) -> None:
        """Wait until all is populated."""
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        """Leave the tensors alone from now on; may be called twice."""
        self._stops.set()
        self.wait()
        self._parts = []

    def _run(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for number, (address, num_bytes) in enumerate(self._pieces()):
            if self._stops.is_set():
                return
            if number == _URGENT_BYTES // HUGE_PAGE:
                os.nice(_NICENESS)  # of this thread alone, on Linux
            if madvise(address, num_bytes, _POPULATE_WRITE):
                reason = os.strerror(ctypes.get_errno())
                logger.info("the system does not populate memory (%s): first uses of it take longer", reason)
                return

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield addresses and sizes of huge pages, of all tensors in turn: first blocks of all come first."""
        most = min(MOST_BYTES, int(MOST_SHARE * Host().available_bytes())) // len(self._parts)
        parts = [(part.data_ptr(), min(part.nbytes, most)) for part in self._parts]
        for at in range(0, max(num_bytes for _, num_bytes in parts), HUGE_PAGE):
            for address, num_bytes in parts:
                if at < num_bytes:
                    yield address + at, min(HUGE_PAGE, num_bytes - at)
