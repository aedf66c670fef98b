# SPDX-License-Identifier: Apache-2.0
"""Cost of a streamed token besides the model: a null executor, and a load generator in a process of its own.

    python -m benchmarks.overhead [--streams 100] [--tokens 200] [--requests 300] [--step-ms 20] [--rounds 1]
        [--api-servers 1]

Two runs. Without pace: how many tokens per second one API process streams, and its processor time per token. At a
realistic pace of steps: how long a token takes from the end of the core's step to the client's socket. Requests begin
evenly spread, as do those of many users: were all streams at the same token, all would begin and end in one step.

Before the second, how often and how long each processor stands still though one thread alone wants it: what the
machine's other guests take, nobody can give back to a token.

All tokens are one and the same word, so that the text of an event tells how many tokens it has, and events are as
plain as nearly all are. Processor time is what to compare on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.overhead.pace import FILE, STEP_S, Paced
from benchmarks.served import QUIRE, free_port, wait_until_ready
from quire.engine import core_process
from quire.supervision.progress import cpu_seconds

WORD = "a"
WARM_UP_TOKENS = 10


class Run(NamedTuple):
    """Results of one load; latencies are in milliseconds, the first token's and the others'."""

    tokens_per_s: float
    events_per_token: float
    api_us: float
    core_us: float
    first: list[float]
    later: list[float]


@contextmanager
def server(num_streams: int, step_ms: float, num_api: int, times: Path) -> Iterator[tuple[int, int]]:
    """Port and process id of a server that is ready."""
    port = free_port()
    name = f"{Paced.__module__}:{Paced.__name__}"
    flags = [
        "--distributed-executor-backend",
        "null",
        "--max-num-seqs",
        str(num_streams),
        "--scheduler-cls",
        name,
    ]
    flags += ["--disable-uvicorn-access-log", "--no-enable-prefix-caching", "--port", str(port)]
    flags += ["--api-server-count", str(num_api)]
    environment = {**os.environ, STEP_S: str(step_ms / 1000), FILE: str(times)}
    process = subprocess.Popen(
        [*QUIRE, "serve", *flags], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}")
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def word_id(port: int) -> int:
    """The token that all answers consist of."""
    body = json.dumps({"prompt": WORD, "add_special_tokens": False}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/tokenize", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked) as reply:
        (token_id,) = json.load(reply)["tokens"]
    return int(token_id)


def load(
    port: int, num_streams: int, num_requests: int, num_tokens: int, start_s: float, step_s: float
) -> Any:
    """Run the load generator and return its results."""
    body = {
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "allowed_token_ids": [word_id(port)],
        "stream": True,
    }
    numbers = map(str, (port, num_streams, num_requests, start_s, step_s))
    command = [sys.executable, "-m", "benchmarks.overhead.client", *numbers, json.dumps(body)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def measured(num_streams: int, num_requests: int, num_tokens: int, step_ms: float, num_api: int) -> Run:
    """Start a server, warm it up, load it."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        with server(num_streams, step_ms, num_api, times) as (port, pid):
            load(port, num_streams, num_streams, WARM_UP_TOKENS, 0.0, 0.0)
            core = core_of(pid)
            groups = ([pid, *(one for one in children_of(pid) if one != core)], [core])
            before = [processor_time(group) for group in groups]
            step_s = step_ms / 1000
            seen = load(
                port, num_streams, num_requests, num_tokens, step_s * num_tokens / num_streams, step_s
            )
            used = [processor_time(group) - earlier for group, earlier in zip(groups, before, strict=True)]
        told = dict(json.loads(line) for line in times.read_text().splitlines())
    num_all = num_requests * num_tokens
    num_events = sum(len(events) for _, events in seen["answers"])
    per_token = [1e6 * seconds / num_all for seconds in used]
    delays = latencies(seen["answers"], told)
    first, later = [one[0] for one in delays], [ms for one in delays for ms in one[1:]]
    return Run(num_all / seen["seconds"], num_events / num_all, *per_token, first, later)


def children_of(pid: int) -> list[int]:
    """The processes that a server has started."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(one) for found in children for one in found]


def core_of(pid: int) -> int:
    """The engine core's process: the server's child."""
    name = core_process.__name__.encode()
    (core,) = [one for one in children_of(pid) if name in Path(f"/proc/{one}/cmdline").read_bytes()]
    return core


def processor_time(pids: list[int]) -> float:
    """Seconds that these processes have computed."""
    return sum(cpu_seconds(pid) or 0.0 for pid in pids)


def latencies(
    answers: list[tuple[str, list[tuple[float, int]]]], told: dict[str, list[float]]
) -> list[list[float]]:
    """From the core to the client's socket, milliseconds of each token of each answer."""
    found = []
    for answer_id, events in answers:
        left = told[next(name for name in told if name.startswith(answer_id))]
        came = [time for time, num_chars in events for _ in range(num_chars // len(WORD))]
        found.append([1000 * (then - earlier) for earlier, then in zip(left, came, strict=True)])
    return found


def standstills(seconds: float = 3.0) -> str:
    """Describe the standstills of each processor: their number and the longest, above half a millisecond."""
    program = (
        "import os, sys, time\n"
        "os.sched_setaffinity(0, {int(sys.argv[1])})\n"
        "last = time.monotonic()\n"
        "end = last + float(sys.argv[2])\n"
        "while last < end:\n"
        "    now = time.monotonic()\n"
        "    if now - last > 5e-4:\n"
        "        print(1000 * (now - last))\n"
        "    last = now\n"
    )
    told = []
    for processor in sorted(os.sched_getaffinity(0)):
        command = [sys.executable, "-c", program, str(processor), str(seconds)]
        gaps = [float(line) for line in subprocess.check_output(command, text=True).splitlines()]
        told.append(f"{processor}: {len(gaps)} times, at most {max(gaps, default=0.0):.1f} ms")
    return f"processors stood still in {seconds:g} s: {'; '.join(told)}"


def shares(latencies: list[float]) -> str:
    """The middle and the end of a distribution."""
    of_100 = statistics.quantiles(latencies, n=100)
    return f"median {of_100[49]:.2f} ms, p99 {of_100[98]:.2f} ms, worst {max(latencies):.1f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--api-servers", type=int, default=1)
    args = parser.parse_args()
    for _ in range(args.rounds):
        fast = measured(args.streams, args.requests, args.tokens, 0.0, args.api_servers)
        print(
            f"without pace: {fast.tokens_per_s:.0f} tokens/s in {fast.events_per_token:.2f} events per token; "
            f"processor time per token: API {fast.api_us:.1f} us, core {fast.core_us:.1f} us",
            flush=True,
        )
        print(standstills(), flush=True)
        paced = measured(args.streams, args.requests, args.tokens, args.step_ms, args.api_servers)
        print(
            f"a step each {args.step_ms:g} ms: {paced.tokens_per_s:.0f} tokens/s in {paced.events_per_token:.2f} "
            f"events per token; API {paced.api_us:.1f} us per token\n"
            f"  from core to client: {shares(paced.later)}\n"
            f"  first tokens:        {shares(paced.first)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
