# SPDX-License-Identifier: Apache-2.0
"""Loss of a server against offline generation of the same load, where both have the same processors.

    python benchmarks/served.py MODEL [--num-rounds 8] [--num-prompts 48] [--batch 16] [--in-flight 16]
        [-- ENGINE FLAGS]

An offline engine and a server, both of the same flags, stay up and take turns; who waits uses no processor. The load
generator shares the machine with the server, so what it takes counts too, its start not. With no more requests in
flight than the batch has places, a place stays empty from a request's end until the client has sent another one, which
is the client's loss; a server with a queue has none. Prints output tokens per second of each round and the median of
the rounds' differences.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire.bench.backends import QuireBackend
from quire.bench.throughput import measure, warm_up
from quire.bench.workload import random_prompts
from quire.entrypoints.cli.options import EngineCommand, engine_config

QUIRE = (sys.executable, "-m", "quire.entrypoints.cli.main")
INPUT_LEN, OUTPUT_LEN = 64, 32
START_LIMIT_S = 120.0


class Offline:
    """An engine in this process."""

    def __init__(self, flags: Sequence[str]) -> None:
        context = EngineCommand("engine", params=[]).make_context("engine", list(flags))
        self._engine = QuireBackend(engine_config(context.params))

    def tokens_per_s(self, num_prompts: int, seed: int) -> float:
        prompts = random_prompts(num_prompts, INPUT_LEN, range(self._engine.vocab_size), seed)
        return measure(self._engine, prompts, OUTPUT_LEN).output_tokens_per_second

    def warm_up(self) -> None:
        warm_up(self._engine, random_prompts(1, INPUT_LEN, range(self._engine.vocab_size), 0))


def served(url: str, num_prompts: int, in_flight: int, seed: int) -> float:
    """Output tokens per second of a server with so many requests in flight."""
    lengths = ("--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN), "--ignore-eos")
    load = ("--num-prompts", str(num_prompts), "--max-concurrency", str(in_flight), "--seed", str(seed))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [*QUIRE, "bench", "serve", "--base-url", url, *load, *lengths, "--json", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr.strip() or done.stdout.strip())
        throughput: float = json.loads(out.read_text())["output_throughput"]
        return throughput


@contextmanager
def server(model: str, flags: Sequence[str]) -> Iterator[str]:
    """The address of a server that is ready."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*QUIRE, "serve", model, "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(process, url)
        yield url
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < limit:
        try:
            urllib.request.urlopen(f"{url}/health").close()
        except urllib.error.URLError:  # not yet
            time.sleep(0.1)
        else:
            return
    sys.exit(f"the server did not start; `{' '.join(QUIRE[1:])} serve` with the same flags says why")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--num-rounds", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16, help="places in a step (--max-num-seqs of both)")
    parser.add_argument(
        "--in-flight", type=int, help="requests that the server has at a time (default: the batch)"
    )
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    in_flight = args.in_flight or args.batch
    flags = ["--max-num-seqs", str(args.batch), "--no-enable-prefix-caching", *given[end + 1 :]]
    offline = Offline(["--model", args.model, *flags])
    offline.warm_up()
    losses = []
    with server(args.model, flags) as url:
        served(url, in_flight, in_flight, 0)
        for number in range(args.num_rounds):
            alone = offline.tokens_per_s(args.num_prompts, 2 * number + 1)
            there = served(url, args.num_prompts, in_flight, 2 * number + 2)
            losses.append(1 - there / alone)
            print(f"offline {alone:8.1f}   served {there:8.1f} tok/s", flush=True)
    print(f"loss {100 * statistics.median(losses):.1f} % (median of {len(losses)} rounds)")


if __name__ == "__main__":
    main()
