# SPDX-License-Identifier: Apache-2.0
"""A scheduler that begins its steps at a chosen rate and writes down when each token left the core."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from quire.scheduler.scheduler import Scheduler

STEP_S, FILE = "OVERHEAD_STEP_S", "OVERHEAD_FILE"
"""Variables of the environment: seconds from step to step, and where times go, a JSON line per request."""


class Paced(Scheduler):
    """For the null executor: its steps take as long as those of a model would."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._step_s = float(os.environ[STEP_S])
        self._next_s = 0.0
        self._times: dict[str, list[float]] = {}
        self._file = open(os.environ[FILE], "a")  # noqa: SIM115 - open as long as the process lives

    def update_from_output(self, plan: Any, output: Any, now: float) -> Any:
        """Delay a step's results until the step of a real model would be done."""
        self._next_s = max(self._next_s + self._step_s, now)
        time.sleep(max(0.0, self._next_s - now))
        updates = super().update_from_output(plan, output, now)
        told = time.time()  # the clock by which the client's kernel stamps what comes
        for update in updates:
            if update.new_token_ids:
                self._times.setdefault(update.request_id, []).append(told)
            if update.finish_reason is not None:
                times = self._times.pop(update.request_id, [])
                self._file.write(json.dumps([update.request_id, times]) + "\n")
                self._file.flush()
        return updates
