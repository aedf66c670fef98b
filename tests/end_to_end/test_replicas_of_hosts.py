# SPDX-License-Identifier: Apache-2.0
"""Two hosts, each a tree of processes with a directory and a checkpoint of its own, have the replicas of one server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.server import QUIRE, Server, children_of, free_port, has_ended

FLAGS = ["--data-parallel-size=2", "--data-parallel-size-local=1", "--routing-policy=round_robin"]
FLAGS += ["--device=cpu", "--cpu-threads=1", "--max-model-len=64"]
BODY = {"prompt": [3, 1, 4, 1, 5], "max_tokens": 50, "ignore_eos": True, "temperature": 0.0, "logprobs": 1}


@contextmanager
def other_host(model: Path, base: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A host with replica 1 and a copy of the checkpoint."""
    own = Path(shutil.copytree(model, base / "elsewhere" / "checkpoint", dirs_exist_ok=True))
    flags = [*FLAGS, f"--data-parallel-rpc-port={port}", "--data-parallel-start-rank=1", "--headless"]
    environment = os.environ | {"TMPDIR": str(base / "elsewhere")}
    process = subprocess.Popen([*QUIRE, "serve", str(own), *flags], env=environment)
    yield process
    process.kill()
    process.wait()


def completion(server: Server) -> Any:
    (choice,) = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).json()["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def by_replica(server: Server, metric: str = "request_success_total") -> list[float]:
    """Requests that each has served, or another number."""
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(f"quire:{metric}{{")]
    return [sum(float(line.split()[-1]) for line in lines if f'engine="{core}"' in line) for core in range(2)]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.more
def test_killed_host_rejoins_and_ends_with_the_server(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    model, port = tiny_model("llama"), free_port()
    log = tmp_path / "log"
    server = Server(str(model), *FLAGS, f"--data-parallel-rpc-port={port}", log=log, TMPDIR=str(tmp_path))

    def served_by_both(pool: ThreadPoolExecutor) -> None:
        before = by_replica(server)
        assert len({str(one) for one in pool.map(lambda _: completion(server), range(8))}) == 1
        assert all(now > then for now, then in zip(by_replica(server), before, strict=True))

    try:
        with ThreadPoolExecutor(8) as pool:
            with other_host(model, tmp_path, port) as host:
                server.wait_ready()
                expected = completion(server)
                served_by_both(pool)
                processes = children_of(host.pid)
                work = [pool.submit(completion, server) for _ in range(40)]
                time.sleep(0.1)
                os.kill(host.pid, signal.SIGKILL)
                assert all(one.result() == expected for one in work)
                assert server.health() == 200
                until(lambda: all(map(has_ended, processes)))
            with other_host(model, tmp_path, port) as host:
                until(lambda: log.read_text().count("replica 1 has joined from 127.0.0.1") == 2)
                until(lambda: by_replica(server, "engine_core_up") == [1, 1])
                served_by_both(pool)
                assert completion(server) == expected
                assert server.stop() == 0
                assert host.wait(300) == 0
    finally:
        server.process.kill()
    assert not list((tmp_path / "elsewhere").glob("quire-*"))
