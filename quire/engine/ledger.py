"""`Ledger`: numbers that the API processes of one server share.

Invariant: every process has a page that it alone writes (but for `HANDED`, which the first process writes on all),
and all may read; so nobody waits for anybody, and the page of one that has died is known to be at rest. What
several write, the accounts of tenants, is written under the lock, which a process that dies lets go.
"""

from __future__ import annotations

import fcntl
import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import IO

WORD = 8
ACCOUNT = 4
"""Numbers of one tenant's account."""


class Column(IntEnum):
    """What is counted on each page; behind these, what each tenant runs in the process."""

    HANDED = 0
    """Connections that the process was given, and those of them that are closed."""
    CLOSED = 1
    WAITING = 2
    """Sequences without news of the core, and the tokens of their prompts."""
    WAITING_TOKENS = 3
    COMPUTED_TOKENS = 4
    """Tokens of prompts that were computed, and tokens that were generated, since the process began."""
    GENERATED_TOKENS = 5
    TURNS = 6
    """Turns of the process's event loop, as its pulse."""


class Load(IntEnum):
    """What is counted of each core of the engine, behind that."""

    SEQUENCES = 0
    """In flight."""
    WAITING_TOKENS = 1
    """Of prompts without news so far: what is to be computed of them, less what is taken to be cached."""
    KV_USE = 2
    """Share of the KV cache that running requests hold; written by the process that is told statistics."""


class Ledger:
    """Doubles in a file without a name that children inherit; or, for one process, in its own memory.

    Args:
        num_pages: processes.
        num_tenants: accounts.
        file: of so many cells, all 0 in the first process.
        num_cores: those of the engine.
    """

    def __init__(
        self, num_pages: int, num_tenants: int = 0, file: IO[bytes] | None = None, num_cores: int = 1
    ) -> None:
        self.num_pages, self.num_tenants = num_pages, num_tenants
        self._width = _width(num_tenants, num_cores)
        self._file = file
        size = WORD * (num_pages * self._width + num_tenants * ACCOUNT)
        memory = bytearray(size) if file is None else mmap.mmap(file.fileno(), size)
        self._cells = memoryview(memory).cast("d")

    @staticmethod
    def create(num_pages: int, num_tenants: int, num_cores: int = 1) -> Ledger:
        """One to be shared."""
        file = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the ledger lives)
        file.write(bytes(WORD * (num_pages * _width(num_tenants, num_cores) + num_tenants * ACCOUNT)))
        file.flush()
        return Ledger(num_pages, num_tenants, file, num_cores)

    def fileno(self) -> int:
        assert self._file is not None, "this one is shared with nobody"
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; what is mapped stays."""
        if self._file is not None:
            self._file.close()

    def page(self, index: int) -> Page:
        return Page(self, index)

    def clear(self, index: int) -> None:
        """The process of this page is gone."""
        for column in range(self._width):
            self._cells[index * self._width + column] = 0.0

    def get(self, index: int, column: int) -> float:
        return self._cells[index * self._width + column]

    def total(self, column: int) -> float:
        """The sum over all pages."""
        return sum(self._cells[column : self.num_pages * self._width : self._width])

    def add(self, index: int, column: int, amount: float) -> None:
        self._cells[index * self._width + column] += amount

    def put(self, index: int, column: int, value: float) -> None:
        self._cells[index * self._width + column] = value

    def load_column(self, core: int, load: Load) -> int:
        return _width(self.num_tenants, core) + load

    def account(self, tenant: int) -> memoryview[float]:
        """The numbers of a tenant, all 0 at first; to be read and written under the lock."""
        start = self.num_pages * self._width + tenant * ACCOUNT
        return self._cells[start : start + ACCOUNT]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the other processes out, but not other threads of this one. Never wait for anything inside."""
        if self._file is None:
            yield
            return
        # Not `flock`: the file was inherited, and all who have it would have that lock.
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


class Page:
    """A ledger as one process sees it."""

    def __init__(self, ledger: Ledger, index: int) -> None:
        self.ledger = ledger
        self.index = index

    def add(self, column: int, amount: float) -> None:
        """On the own page."""
        self.ledger.add(self.index, column, amount)

    def put(self, column: int, value: float) -> None:
        """On the own page."""
        self.ledger.put(self.index, column, value)

    def total(self, column: int) -> float:
        """On all pages."""
        return self.ledger.total(column)


def _width(num_tenants: int, num_cores: int) -> int:
    """Numbers of a page."""
    return len(Column) + num_tenants + num_cores * len(Load)
