# SPDX-License-Identifier: Apache-2.0
"""A rank ends its actor when that is stopped; here the actor is any process that has started another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

RANK = """
import os, time
from quire.executor.ranks import ray_ranks as ray_actor
ray_actor.POLL_S = 0.05
actor = os.getppid()
ray_actor.watch_actor()
print("watching", flush=True)
while os.getppid() == actor:
    time.sleep(0.05)
"""
ACTOR = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_stopped_actor_is_ended_and_a_running_one_is_not() -> None:
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR, RANK],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert actor.stdout is not None
    with actor.stdout as said:
        assert said.readline() == "watching\n"
        os.kill(actor.pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(actor.pid, signal.SIGCONT)
        assert actor.poll() is None, "it was stopped for a moment"
        os.kill(actor.pid, signal.SIGSTOP)
        assert actor.wait(30) == -signal.SIGKILL
        assert said.read() == "", "the rank has ended, too"
