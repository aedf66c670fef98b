"""What a server loses against offline generation of the same load, where both have the same processors.

    python benchmarks/served.py MODEL [--num-rounds 3] [--num-prompts 48] [-- ENGINE FLAGS]

Offline and served runs alternate; the load generator shares the machine with the server, so what it takes counts too.
Prints output tokens per second of each round and the medians' difference.
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

QUIRE = (sys.executable, "-m", "quire.entrypoints.cli.main")
INPUT_LEN, OUTPUT_LEN = 64, 32
START_LIMIT_S = 120.0


def measured(command: Sequence[str]) -> dict[str, float]:
    """What a benchmark of quire's command line writes as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        done = subprocess.run(
            [*QUIRE, *command, "--json", str(out)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr.strip() or done.stdout.strip())
        result: dict[str, float] = json.loads(out.read_text())
        return result


def offline(model: str, num_prompts: int, flags: Sequence[str]) -> float:
    """Output tokens per second of a batch."""
    load = ("--num-prompts", str(num_prompts), "--input-len", str(INPUT_LEN), "--output-len", str(OUTPUT_LEN))
    result = measured(["bench", "throughput", "--model", model, *load, *flags])
    return num_prompts * OUTPUT_LEN / result["elapsed_time"]


def served(model: str, num_prompts: int, flags: Sequence[str], concurrency: int) -> float:
    """Output tokens per second of a server with so many requests in flight."""
    lengths = ("--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN), "--ignore-eos")
    load = ("--num-prompts", str(num_prompts), "--max-concurrency", str(concurrency), *lengths)
    with server(model, flags) as url:
        return measured(["bench", "serve", "--base-url", url, *load])["output_throughput"]


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
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=16)
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    flags = ["--max-num-seqs", str(args.concurrency), "--no-enable-prefix-caching", *given[end + 1 :]]
    pairs = []
    for _ in range(args.num_rounds):
        pair = (
            offline(args.model, args.num_prompts, flags),
            served(args.model, args.num_prompts, flags, args.concurrency),
        )
        pairs.append(pair)
        print(f"offline {pair[0]:8.1f}   served {pair[1]:8.1f} tok/s", flush=True)
    loss = 1 - statistics.median(there / here for here, there in pairs)
    print(f"loss {100 * loss:.1f} % (median of {len(pairs)} rounds)")


if __name__ == "__main__":
    main()
