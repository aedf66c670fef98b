# SPDX-License-Identifier: Apache-2.0
"""Seconds to the first token of a model that the router must load, or wake, first.

    python -m benchmarks.model_switch [MODEL] [--rounds 5]

Two models of the shape of MODEL, a directory with a config.json, and memory for one of them: each request needs the
other, which is loaded from packed weights. Requests follow each other at once, or after a pause in which the router
gets its spare process ready; then without one. In the last part there is memory for the weights of both and one KV
cache, so that each request wakes the other from sleep at level 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import yaml

from benchmarks.random_checkpoint import tensors_of, write_checkpoint

PORT = 8977
URL = f"http://127.0.0.1:{PORT}"
ADMIN = {"authorization": "Bearer benchmark"}
START_S = 300.0
OPTIONS = {"skip-tokenizer-init": True, "max-model-len": 1024, "dtype": "bfloat16"}


@contextlib.contextmanager
def serving(
    models: dict[str, Path], memory: str, kv_cache: str, folder: Path, *flags: str
) -> Iterator[httpx.Client]:
    """Serve models, each with a KV cache of this size, with a router that may use so much memory."""
    entry = {"kv_cache": kv_cache, "options": OPTIONS, "keep_alive": -1}
    file = folder / "models.yaml"
    file.write_text(
        yaml.safe_dump({"models": {name: {"model": str(one), **entry} for name, one in models.items()}})
    )
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", "--models", str(file)]
    command += ["--port", str(PORT), "--models-memory", memory, *flags]
    process = subprocess.Popen(command, env={**os.environ, "QUIRE_ADMIN_API_KEY": "benchmark"})
    try:
        with httpx.Client(base_url=URL, timeout=START_S, headers=ADMIN) as client:
            wait_for(client)
            yield client
    finally:
        process.terminate()
        process.wait()


def wait_for(client: httpx.Client) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/livez").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the router does not answer within {START_S:g} s")


def first_token_s(client: httpx.Client, model: str) -> float:
    """Return the seconds until a model's first token."""
    body = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 1, "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        next(reply.iter_lines())
    return time.perf_counter() - started


def turns(client: httpx.Client, models: dict[str, Path], rounds: int, pause_s: float = 0.0) -> list[float]:
    """Return the seconds of each request, after a pause, and after one to each model that does not count."""
    for name in models:
        first_token_s(client, name)  # packs its weights
    seconds = []
    for name in [*models] * rounds:
        time.sleep(pause_s)
        seconds.append(first_token_s(client, name))
    return seconds


def report(name: str, seconds: list[float], goal_s: float) -> None:
    seconds = sorted(seconds)
    print(f"{name:28} best {seconds[0]:.2f} s, median {seconds[len(seconds) // 2]:.2f} s (goal {goal_s:g} s)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="benchmarks/models/dummy-0.5b", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--pause", type=float, default=3.0, help="seconds between requests, of the first part"
    )
    parser.add_argument("--one", default="2200M", help="memory for one model and the spare process")
    parser.add_argument(
        "--both", default="5500M", help="memory for the weights of both and a KV cache of 2 GiB"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {
            name: write_checkpoint(args.model, Path(folder) / name, tensors_of(args.model, seed))
            for seed, name in enumerate(("a", "b"), 1)
        }
        with serving(models, args.one, "128M", Path(folder)) as client:
            report("load after a pause", turns(client, models, args.rounds, args.pause), 1.5)
            report("load at once", turns(client, models, args.rounds), 1.5)
        with serving(models, args.one, "128M", Path(folder), "--no-models-spare") as client:
            report("load without a spare process", turns(client, models, args.rounds), 1.5)
        with serving(models, args.both, "2G", Path(folder)) as client:
            report("wake from sleep level 1", turns(client, models, args.rounds), 0.3)


if __name__ == "__main__":
    main()
