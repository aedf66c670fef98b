# SPDX-License-Identifier: Apache-2.0
"""Soak test of a server: prints each violated condition; the exit code is 1 if there is one."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak.clients import Clients, Findings
from benchmarks.soak.memory import Growth, MemoryLog
from benchmarks.soak.traffic import BAD, BAD_POOLING, EMBEDDER, good_pooling_requests, good_requests
from tests.reliability.service import Service

SERVER = ("--num-gpu-blocks-override", "512", "--max-num-seqs", "24", "--disable-uvicorn-access-log")
"""A cache of few blocks has all been used soon, so that it grows no more; and requests are preempted."""
NOISE_MB = 24.0
RESTARTED_WITHIN_S = 60.0
LEAST_WARM_UP_S, MOST_WARM_UP_S = 10.0, 300.0
"""Of each process, from when it has loaded; a quarter of the time between these."""
LOG_CHARS = 4000
"""Of the server's log, where it is shown."""


class Embedder(Service):
    """A server of the embedder in the box."""

    def canary(self) -> Any:
        return self.post("/v1/embeddings", {"input": "The capital of France is"}).json()["data"]

    def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/embeddings", {"input": text, **fields})


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        make = Embedder if options.pooling else Service
        service = make(*([EMBEDDER] if options.pooling else []), *SERVER, log=Path(folder) / "log")
        try:
            complaints = asyncio.run(soak(service, options))
        finally:
            if service.process.process.poll() is None:
                service.process.process.kill()
                service.process.process.wait()
    for complaint in complaints:
        print("VIOLATION:", complaint)
    print("failed" if complaints else "all held")
    return 1 if complaints else 0


async def soak(service: Service, options: argparse.Namespace) -> list[str]:
    """Traffic with a killed core in its middle; returns what did not hold."""
    warm_up_s = min(MOST_WARM_UP_S, max(LEAST_WARM_UP_S, options.seconds / 4))
    memory = MemoryLog(lambda: _pids(service), warm_up_s)
    traffic = (good_pooling_requests(), BAD_POOLING) if options.pooling else (good_requests(), BAD)
    clients = Clients(service.url, options.clients, options.seed, *traffic)
    memory.start()
    killer = asyncio.create_task(kill_cores(service, clients, memory, options))
    await clients.run(options.seconds)
    complaints = await killer
    memory.stop()
    findings, growths = clients.findings, memory.growths()
    _report(findings, growths)
    complaints += findings.complaints
    complaints += [f"{growth} is a leak" for growth in growths if leaks(growth, options.max_slope)]
    if not findings.outcomes["good, answered"]:
        complaints.append("no request was answered")
    return complaints + await asyncio.to_thread(_at_the_end, service)


async def kill_cores(
    service: Service, clients: Clients, memory: MemoryLog, options: argparse.Namespace
) -> list[str]:
    """Kill the core in the middle, and then every `kill_every` seconds; returns what went wrong."""
    next_at, end = options.seconds / 2, time.monotonic() + options.seconds
    while time.monotonic() + next_at < end:
        await asyncio.sleep(next_at)
        next_at = max(options.kill_every, 300.0)  # the fourth death in ten minutes is the end
        core = service.process.core_pid()
        assert core is not None
        clients.may_refuse = True
        os.kill(core, signal.SIGKILL)
        if not await _comes_back(service, core):
            return [f"no new core within {RESTARTED_WITHIN_S:g} s"]
        memory.begin_anew(service.process.core_pid())
        await asyncio.sleep(1.0)  # refusals that are on their way
        clients.may_refuse = False
    return []


async def _comes_back(service: Service, dead: int) -> bool:
    deadline = time.monotonic() + RESTARTED_WITHIN_S
    while time.monotonic() < deadline:
        is_new = service.process.core_pid() not in (None, dead)
        if is_new and await asyncio.to_thread(service.process.health) == 200:
            return True
        await asyncio.sleep(0.1)
    return False


def leaks(growth: Growth, max_slope: float) -> bool:
    """Whether a process grows faster than is allowed, and by more than noise."""
    return growth.mb_per_hour > max_slope and growth.gained_mb > NOISE_MB


def _at_the_end(service: Service) -> list[str]:
    try:
        service.baseline.check(may_have_new_core=True)
    except AssertionError as error:
        return [str(error)[-LOG_CHARS:]]
    code = service.stop()
    return [f"the server ended with exit code {code}"] if code else []


def _pids(service: Service) -> dict[str, int | None]:
    return {"API process": service.pid, "engine core": service.process.core_pid()}


def _report(findings: Findings, growths: list[Growth]) -> None:
    print(", ".join(f"{count} {name}" for name, count in sorted(findings.outcomes.items())))
    halves = findings.seconds[: len(findings.seconds) // 2], findings.seconds[len(findings.seconds) // 2 :]
    print("p99 of the halves:", *(f"{sorted(half)[int(0.99 * len(half))]:.2f} s" for half in halves if half))
    for growth in growths:
        print(growth)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to send traffic")
    parser.add_argument("--clients", type=int, default=12, help="how many clients at once")
    parser.add_argument(
        "--kill-every", type=float, default=3600.0, help="seconds between kills after the first"
    )
    parser.add_argument("--max-slope", type=float, default=30.0, help="MB an hour that a process may grow")
    parser.add_argument("--seed", type=int, default=1, help="of what clients choose")
    parser.add_argument("--pooling", action="store_true", help=f"soak {EMBEDDER} in place of the chat model")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
