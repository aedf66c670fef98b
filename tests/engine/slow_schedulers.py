# SPDX-License-Identifier: Apache-2.0
"""Schedulers that a core is to be met at its work with; a core process imports this file and nothing of the tests'."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from quire.scheduler.scheduler import Scheduler

POISON = 99
STEP_S = 0.005
HELD = "QUIRE_TEST_HELD"  # names a file; while it exists, requests do not end for seconds
HELD_TOKENS, HELD_STEP_S = 20, 0.25


def hold_cores() -> None:
    """Keep requests of `Slow` cores from their ends until `release_cores`."""
    Path(os.environ[HELD]).touch()


def release_cores() -> None:
    """Let requests of `Slow` cores end."""
    Path(os.environ[HELD]).unlink()


class Slow(Scheduler):
    """Takes its time, so that a core can be met in the middle of its work, however busy the machine is."""

    def schedule(self, now: float) -> Any:
        time.sleep(HELD_STEP_S if self._is_held() else STEP_S)
        return super().schedule(now)

    def _is_held(self) -> bool:
        file = os.environ.get(HELD)
        late = any(request.num_output_tokens >= HELD_TOKENS for request in self._queues.running)
        return late and file is not None and Path(file).exists()


class Poisoned(Slow):
    """Dies of a request whose prompt begins with POISON."""

    def update_from_output(self, plan: Any, output: Any, now: float) -> Any:
        if any(data.token_ids[0] == POISON for data in plan.new_requests):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update_from_output(plan, output, now)


class Spinning(Slow):
    """Computes for ever once a request comes whose prompt begins with POISON."""

    def update_from_output(self, plan: Any, output: Any, now: float) -> Any:
        while any(data.token_ids[0] == POISON for data in plan.new_requests):
            pass
        return super().update_from_output(plan, output, now)


class NeverThere(Scheduler):
    """Is still being made when its core is to end."""

    def __init__(self, *args: Any) -> None:
        time.sleep(60)
