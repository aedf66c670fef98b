"""Checks of constraints off the event loop, a bounded number at a time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from quire.engine.constraints import Constraints, busy
from quire.sampling_params import SamplingParams

_CHECKS = ThreadPoolExecutor(64, thread_name_prefix="quire-constraints")
"""Threads that wait for an answer of a checker, as many as there may be checkers. Waiting for a turn needs none."""


class ConstraintChecks:
    """Checks of one asynchronous engine."""

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints

    async def settled(self, params: SamplingParams, tenant: str = "") -> SamplingParams:
        """As `Constraints.settled`, and raises as that does."""
        known = self._constraints.known(params)
        if known is not None:
            return known
        with self._constraints.take_turn(tenant) as turn:
            try:
                await asyncio.wait_for(asyncio.wrap_future(turn.granted), self._constraints.max_wait_s)
            except TimeoutError:
                raise busy() from None
            # The thread ends the turn: it goes on when the client has gone.
            return await asyncio.get_running_loop().run_in_executor(
                _CHECKS, self._constraints.checked, params, turn
            )
