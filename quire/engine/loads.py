"""`Loads`: what each core of an engine has to do, for all of its front ends.

Invariant: each front end counts its own requests on its page of the ledger, and what it is told is of all.
"""

from __future__ import annotations

from quire.engine.ledger import Ledger, Load, Page


class Loads:
    """The numbers of `num_cores` cores.

    Args:
        page: of a ledger with room for so many; None: there are no other front ends.
    """

    def __init__(self, num_cores: int, page: Page | None = None) -> None:
        self._page = page or Ledger(1, num_cores=num_cores).page(0)

    def of(self, core: int, load: Load) -> float:
        """Of all front ends."""
        return self._page.total(self._page.ledger.load_column(core, load))

    def add(self, core: int, load: Load, amount: float) -> None:
        self._page.add(self._page.ledger.load_column(core, load), amount)

    def put(self, core: int, load: Load, value: float) -> None:
        """What this front end says from now on."""
        self._page.put(self._page.ledger.load_column(core, load), value)
