"""What a streamed token costs besides the model: a null executor, and a load generator in a process of its own.

    python -m benchmarks.overhead [--streams 100] [--tokens 200] [--requests 300] [--step-ms 20]

Two runs. Without pace: how many tokens per second one API process streams, and its processor time per token. At a
realistic pace of steps: how long a token takes from the core's step to the client's socket. Processor time is what to
compare on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.overhead.pace import FILE, STEP_S, Paced
from benchmarks.served import QUIRE, free_port, wait_until_ready
from quire.engine.progress import cpu_seconds

OPENING = 1
"""Events of a chat stream before the first token."""


class Run(NamedTuple):
    """What one load showed; latencies are milliseconds."""

    tokens_per_s: float
    events_per_token: float
    api_us: float
    core_us: float
    latencies: list[float]


@contextmanager
def server(num_streams: int, step_ms: float, times: Path) -> Iterator[tuple[int, int]]:
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
    environment = {**os.environ, STEP_S: str(step_ms / 1000), FILE: str(times)}
    process = subprocess.Popen([*QUIRE, "serve", *flags], env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}")  # type: ignore[arg-type]
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def load(port: int, num_streams: int, num_requests: int, num_tokens: int, *options: str) -> Any:
    """What the load generator saw."""
    numbers = map(str, (port, num_streams, num_requests, num_tokens))
    command = [sys.executable, "-m", "benchmarks.overhead.client", *numbers, *options]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def measured(num_streams: int, num_requests: int, num_tokens: int, step_ms: float) -> Run:
    """Start a server, warm it up, load it."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        with server(num_streams, step_ms, times) as (port, pid):
            load(port, num_streams, num_streams, 10)
            pids = (pid, core_of(pid))
            before = [cpu_seconds(one) or 0.0 for one in pids]
            seen = load(port, num_streams, num_requests, num_tokens, *(["--token-ids"] if step_ms else []))
            used = [(cpu_seconds(one) or 0.0) - earlier for one, earlier in zip(pids, before, strict=True)]
        told = dict(json.loads(line) for line in times.read_text().splitlines())
    num_all = num_requests * num_tokens
    num_events = sum(num - OPENING for _, num, _ in seen["answers"])
    per_token = [1e6 * seconds / num_all for seconds in used]
    return Run(num_all / seen["seconds"], num_events / num_all, *per_token, latencies(seen["answers"], told))


def core_of(pid: int) -> int:
    """The engine core's process: the server's child."""
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    (child,) = [int(one) for found in children for one in found]
    return child


def latencies(answers: list[tuple[str, int, list[float]]], told: dict[str, list[float]]) -> list[float]:
    """From the core to the client, of all tokens whose ids came along."""
    found = []
    for answer_id, _, came in answers:
        core_id = next(name for name in told if name.startswith(answer_id))
        if came:
            found += [1000 * (then - left) for left, then in zip(told[core_id], came, strict=True)]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=20.0)
    args = parser.parse_args()
    fast = measured(args.streams, args.requests, args.tokens, 0.0)
    print(
        f"without pace: {fast.tokens_per_s:.0f} tokens/s in {fast.events_per_token:.2f} events per token; processor "
        f"time per token: API {fast.api_us:.1f} us, core {fast.core_us:.1f} us",
        flush=True,
    )
    paced = measured(args.streams, args.requests, args.tokens, args.step_ms)
    shares = statistics.quantiles(paced.latencies, n=100) if len(paced.latencies) > 1 else [0.0] * 99
    print(
        f"a step each {args.step_ms:g} ms: {paced.tokens_per_s:.0f} tokens/s in {paced.events_per_token:.2f} events "
        f"per token; API {paced.api_us:.1f} us per token; from core to client: median {shares[49]:.2f} ms, p99 "
        f"{shares[98]:.2f} ms"
    )


if __name__ == "__main__":
    main()
