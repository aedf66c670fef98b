# SPDX-License-Identifier: Apache-2.0
"""The core ends soon after its parent, however that ended, and both leave nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.client import ProcessClient
from quire.engine.core_service import PARENT_POLL_S
from quire.engine.messages import CoreReady, UtilityCall, UtilityResult
from quire.engine.startup import prepare
from quire.scheduler.scheduler import Scheduler
from tests.engine.slow_schedulers import NeverThere
from tests.fixtures.quick import quick

GONE_WITHIN_S = 60.0
PARENT = """
import sys
from quire.config import EngineConfig
from quire.engine.client import ProcessClient
from quire.engine.messages import AddRequest, EngineCoreRequest
from quire.engine.startup import prepare
from quire.sampling_params import SamplingParams

config = EngineConfig.from_args(
    model=sys.argv[1], distributed_executor_backend="null", max_num_seqs=16, scheduler_cls=sys.argv[2]
)
client = ProcessClient(prepare(config, "server"))
print(client.process.pid, flush=True)
for number in range(5000):  # minutes of work
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    client.send(AddRequest(EngineCoreRequest(str(number), [1, 2, 3], params, 0.0)))
client.receive()
print("ready", flush=True)
while client.receive():
    pass
"""


@contextmanager
def parent_of_a_busy_core(
    model: Path, scheduler: type[Scheduler]
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has just started a core, and the folder that is its TMPDIR."""
    with tempfile.TemporaryDirectory() as folder:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(model), f"{scheduler.__module__}:{scheduler.__name__}"],
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        core_pid = int(parent.stdout.readline())
        try:
            yield parent, Path(folder)
        finally:
            parent.kill()
            parent.wait()
            if not has_ended(parent):
                os.kill(core_pid, signal.SIGKILL)


def has_ended(parent: subprocess.Popen[str], timeout_s: float = 0.0) -> bool:
    """Whether nobody has the other end of its stderr any more, which its core has inherited."""
    with suppress(subprocess.TimeoutExpired):
        parent.communicate(timeout=timeout_s)
        return True
    return False


def check_that_nothing_is_left(
    model: Path, kill_after_s: float, *, when_ready: bool = False, scheduler: type[Scheduler] = Scheduler
) -> None:
    with parent_of_a_busy_core(model, scheduler) as (parent, folder):
        assert parent.stdout is not None
        if when_ready:
            parent.stdout.readline()
        time.sleep(kill_after_s)
        parent.kill()
        assert has_ended(parent, GONE_WITHIN_S), f"the core lives on after a kill at {kill_after_s:.2f} s"
        assert not list(folder.iterdir())


@pytest.mark.item(46)
@pytest.mark.parametrize(
    ("kill_after_s", "when_ready"),
    quick([(0.0, False), (0.4, False), (0.1, True)], [(0.1, True)]),
)
def test_nothing_is_left_of_the_core_of_a_killed_parent(
    kill_after_s: float, when_ready: bool, null_model_dir: Path
) -> None:
    """Killed before the core can ask who its parent is, while it starts, and under load."""
    check_that_nothing_is_left(null_model_dir, kill_after_s, when_ready=when_ready)


@pytest.mark.more
@pytest.mark.item(46)
def test_nothing_is_left_of_a_core_that_is_loading(null_model_dir: Path) -> None:
    check_that_nothing_is_left(null_model_dir, 1.0, scheduler=NeverThere)


@pytest.mark.more
@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_left_whenever_the_parent_is_killed(seed: int, null_model_dir: Path) -> None:
    check_that_nothing_is_left(null_model_dir, random.Random(seed).uniform(0.0, 2.0))


def test_a_core_outlives_the_thread_that_started_it(null_model_dir: Path) -> None:
    config = EngineConfig.from_args(model=str(null_model_dir), distributed_executor_backend="null")
    clients: list[ProcessClient] = []
    thread = threading.Thread(target=lambda: clients.append(ProcessClient(prepare(config, "server"))))
    thread.start()
    thread.join()
    (client,) = clients
    try:
        (ready,) = client.receive()
        assert isinstance(ready, CoreReady)
        time.sleep(2 * PARENT_POLL_S)
        client.send(UtilityCall(1, "stats"))
        (answer,) = client.receive()
        assert isinstance(answer, UtilityResult)
    finally:
        client.close()
