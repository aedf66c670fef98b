"""`ConstraintChecks`: constraints of requests are checked off the event loop, a bounded number at a time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from quire.engine.constraints import Constraints
from quire.errors import UnavailableError
from quire.sampling_params import SamplingParams

MAX_CHECKS = 64
_CHECKS = ThreadPoolExecutor(8, thread_name_prefix="quire-constraints")
"""Threads that wait for the checkers of constraints; those that find none free wait there."""


class ConstraintChecks:
    """Those of one asynchronous engine."""

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints
        self.num_waiting = 0

    async def settled(self, params: SamplingParams) -> SamplingParams:
        """As `Constraints.settled`, and raises as that does.

        Raises:
            UnavailableError: as many wait to be checked as may.
        """
        if self._constraints.is_known(params):
            return self._constraints.settled(params)
        if self.num_waiting >= MAX_CHECKS:
            raise UnavailableError(f"{self.num_waiting} constraints wait to be checked, the most that may")
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                _CHECKS, self._constraints.settled, params
            )
        finally:
            self.num_waiting -= 1
