# SPDX-License-Identifier: Apache-2.0
"""Engines with a KV store, and prefill and decode apart, beside engines without.

    python -m benchmarks.kv_store engines restart   # first token after a restart, beside a warm hit
    python -m benchmarks.kv_store engines step      # cost of a step with a store and no hit
    python -m benchmarks.kv_store engines decode    # decode while blocks are written behind
    python -m benchmarks.kv_store engines apart     # time between tokens beside long prompts

The model has the shape of one with 0.5B parameters and no weights (`--model`, `--options`). Pairs alternate, and the
best or median round counts, as the line says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.made_up import written
from benchmarks.served import QUIRE, free_port, wait_until_ready
from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.kv_store import population
from quire.sampling_params import SamplingParams

MODEL = Path(__file__).parent / "models" / "dummy-0.5b"
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


class Bench:
    """Engines of one model, and where their rows lie."""

    def __init__(self, given: argparse.Namespace, directory: Path) -> None:
        self.given, self.directory = given, directory
        self._draw = random.Random(1)

    def engine(self, *, stores: bool, model: Path | None = None, **changes: Any) -> LLMEngine:
        store = {"kv_store": str(self.directory / "rows"), "kv_store_gb": 4.0} if stores else {}
        fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 8}
        options = fixed | json.loads(self.given.options) | store | changes
        return LLMEngine(EngineConfig.from_args(model=str(model or self.given.model), **options))

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._draw.randrange(3, 500) for _ in range(num_tokens)]


def generate(engine: LLMEngine, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[float], Any]:
    """Return the seconds to the first token of all, those of each step behind it, and the last output."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    start, first_s, steps, begun, last = time.perf_counter(), 0.0, [], set[str](), None
    while engine.has_unfinished_requests():
        before = time.perf_counter()
        for last in engine.step():
            begun.add(last.request_id)
        if len(begun) == len(prompts) and first_s:
            steps.append(time.perf_counter() - before)
        elif len(begun) == len(prompts):
            first_s = time.perf_counter() - start
    return first_s, steps, last


def restart(bench: Bench) -> None:
    """First token of a long prompt: computed, from the warm prefix cache, and from disk after restarts.

    Restarts alternate between memory that is populated ahead and memory that is not.
    """
    prompt = bench.prompt(bench.given.prompt_tokens)
    first = started(bench)[0]
    cold_s, _, _ = generate(first, [prompt], 1)
    warm_s = min(generate(first, [prompt], 1)[0] for _ in range(5))
    first.shutdown()
    print(f"computed {cold_s:.3f} s   warm hit {warm_s * 1e3:.1f} ms (best of 5)", flush=True)
    times: dict[int, list[tuple[float, float]]] = {0: [], population.MOST_BYTES: []}
    for _ in range(bench.given.num_rounds):
        for most, measured in times.items():
            population.MOST_BYTES = most
            engine, start_s = started(bench)
            gc.collect()  # a server has its garbage frozen
            stored_s, _, output = generate(engine, [prompt], 1)
            engine.shutdown()
            measured.append((stored_s, start_s))
    for most, measured in times.items():
        stored, starts = (sorted(column) for column in zip(*measured, strict=True))
        median_s = statistics.median(stored)
        print(
            f"after a restart, {most >> 20:4d} MiB populated ahead: {median_s * 1e3:.1f} ms ({stored[0] * 1e3:.1f} to "
            f"{stored[-1] * 1e3:.1f}), {median_s / warm_s:.2f}x a warm hit; engine started in "
            f"{statistics.median(starts):.2f} s   cached_tokens {output.num_cached_tokens}, "
            f"stored {output.num_stored_tokens}"
        )


def started(bench: Bench) -> tuple[LLMEngine, float]:
    """Return an engine with a store that has answered a short prompt, and the seconds until it was ready."""
    start = time.perf_counter()
    engine = bench.engine(stores=True, max_model_len=bench.given.prompt_tokens + 64)
    start_s = time.perf_counter() - start
    generate(engine, [bench.prompt(64)], 2)
    return engine, start_s


def paired(
    bench: Bench, run: Callable[[LLMEngine], float], num_rounds: int, **changes: Any
) -> list[tuple[float, float]]:
    """Return (with a store, without) of alternating rounds on two engines."""
    plain, storing = bench.engine(stores=False, **changes), bench.engine(stores=True, **changes)
    run(plain), run(storing)
    pairs = []
    for number in range(num_rounds):
        order = (storing, plain) if number % 2 else (plain, storing)
        seconds = {id(engine): run(engine) for engine in order}
        pairs.append((seconds[id(storing)], seconds[id(plain)]))
    plain.shutdown()
    storing.shutdown()
    return pairs


def step(bench: Bench) -> None:
    """Cost of a step on the host, which does not depend on the model's size: that of a tiny one."""
    model = written(bench.directory, **TINY)

    def run(engine: LLMEngine) -> float:
        _, steps, _ = generate(engine, [bench.prompt(20) for _ in range(8)], bench.given.num_tokens)
        return statistics.median(steps)

    pairs = paired(
        bench,
        run,
        bench.given.num_rounds,
        model=model,
        max_model_len=1024,
        cpu_threads=1,
        num_scheduler_steps=1,
    )
    with_store, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"step of 8 requests: {with_store * 1e6:.1f} µs with a store, {without * 1e6:.1f} µs without: "
        f"{(with_store - without) * 1e6:+.1f} µs (medians)"
    )


def decode(bench: Bench) -> None:
    """Decode of 8 streams while the blocks of their prompts and outputs are written."""

    def run(engine: LLMEngine) -> float:
        prompts = [bench.prompt(bench.given.prompt_tokens // 16) for _ in range(8)]
        _, steps, _ = generate(engine, prompts, bench.given.num_tokens)
        return sum(steps) / len(steps)

    pairs = paired(bench, run, bench.given.num_rounds, max_model_len=4096)
    losses = [stored / plain - 1 for stored, plain in pairs]
    plain_s = statistics.median(plain for _, plain in pairs)
    print(
        f"step of 8 requests: {plain_s * 1e3:.2f} ms without a store; writing behind takes "
        f"{statistics.median(losses):+.1%} (median of {len(losses)} pairs, {min(losses):+.1%} to {max(losses):+.1%})"
    )


# Prefill and decode apart

BOUND = 64
"""Most tokens of a prompt in a step of the engine that bounds them."""


@contextlib.contextmanager
def server(bench: Bench, cores: set[int], *flags: str) -> Iterator[str]:
    """The address of a server on these cores, ready."""
    port, options = free_port(), json.loads(bench.given.options)
    named = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    command = [
        *QUIRE, "serve", str(bench.given.model), "--port", str(port), "--load-format", "dummy", "--skip-tokenizer-init",
        "--cpu-threads", str(len(cores)), "--max-model-len", "8192", "--num-scheduler-steps", "1", *named, *flags,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def mixed(bench: Bench) -> contextlib.AbstractContextManager[str]:
    """One engine on two cores."""
    return server(bench, {0, 1})


def bounded(bench: Bench) -> contextlib.AbstractContextManager[str]:
    """One engine on two cores, whose steps compute few tokens of prompts while streams generate."""
    return server(bench, {0, 1}, "--long-prefill-token-threshold", str(BOUND))


@contextlib.contextmanager
def halves(bench: Bench) -> Iterator[str]:
    """A prefill engine on one core, a decode engine on the other, and the proxy."""
    port, kv_port = free_port(), free_port()
    common = {"kv_connector": "RowServerConnector", "kv_port": kv_port}
    extra = {"peers": [f"127.0.0.1:{kv_port}"], "pull_timeout_s": 120, "lease_s": 120}
    offers = common | {"kv_role": "kv_producer"}
    pulls = common | {"kv_role": "kv_consumer", "kv_connector_extra_config": extra}
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(server(bench, {0}, "--kv-transfer-config", json.dumps(offers)))
        decoder = stack.enter_context(server(bench, {1}, "--kv-transfer-config", json.dumps(pulls)))
        proxy = subprocess.Popen(
            [*QUIRE, "disagg-proxy", "--prefill", prefill, "--decode", decoder, "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(proxy.wait)
        stack.callback(proxy.terminate)
        wait_until_ready(proxy, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"


class Load:
    """8 streams, each followed by the next, and a long prompt now and then.

    Attributes:
        gaps: seconds between tokens of the streams.
        num_tokens: of the streams.
        num_prompts: long prompts that were answered.
    """

    def __init__(self, bench: Bench, url: str) -> None:
        self._bench, self._url = bench, url
        self.gaps: list[float] = []
        self.num_tokens = self.num_prompts = 0

    async def run(self, seconds: float, *, with_prompts: bool) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            tasks = [asyncio.create_task(self._streams(client)) for _ in range(8)]
            if with_prompts:
                tasks.append(asyncio.create_task(self._prompts(client)))
            await asyncio.sleep(seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _streams(self, client: Any) -> None:
        while True:
            body = self._body(32, max_tokens=256, stream=True)
            last = None
            async with client.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps.append(now - last)
                    last, self.num_tokens = now, self.num_tokens + 1

    async def _prompts(self, client: Any) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._prompt(client))
                await asyncio.sleep(self._bench.given.every)

    async def _prompt(self, client: Any) -> None:
        body = self._body(self._bench.given.prompt_tokens // 2, max_tokens=2, stream=False)
        reply = await client.post(f"{self._url}/v1/completions", json=body)
        self.num_prompts += reply.status_code == 200

    def _body(self, num_tokens: int, **rest: Any) -> dict[str, Any]:
        return {"prompt": self._bench.prompt(num_tokens), "temperature": 0, "ignore_eos": True} | rest


def apart(bench: Bench) -> None:
    """Time between tokens of 8 streams, alone and beside a long prompt each `--every` seconds."""
    kinds = {
        "one engine, 2 cores": mixed,
        f"the same, {BOUND} tokens of prompts a step": bounded,
        "prefill 1, decode 1": halves,
    }
    p99s = []
    for name, serve in kinds.items():
        with serve(bench) as url:
            alone, load = Load(bench, url), Load(bench, url)
            asyncio.run(alone.run(bench.given.seconds / 4, with_prompts=False))
            asyncio.run(load.run(bench.given.seconds, with_prompts=True))
        (alone_s, _), (p50, p99) = quantiles(alone.gaps), quantiles(load.gaps)
        p99s.append(p99)
        print(
            f"{name}: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms between tokens, {alone_s * 1e3:.1f} ms without "
            f"prompts; {load.num_tokens / bench.given.seconds:.1f} tok/s, {load.num_prompts} long prompts",
            flush=True,
        )
    print(f"p99 is {p99s[0] / p99s[2]:.1f}x better apart, {p99s[0] / p99s[1]:.1f}x with bounded steps")


def quantiles(gaps: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    ordered = sorted(gaps) or [float("nan")]
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


WHAT = {"restart": restart, "step": step, "decode": decode, "apart": apart}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kv_store engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--directory", default=None, help="Directory on the disk to measure.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--options", default="{}", help="JSON object of engine options, by field name.")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--num-tokens", type=int, default=96, help="Tokens of a stream in a round.")
    parser.add_argument("--num-rounds", type=int, default=8)
    parser.add_argument("--every", type=float, default=1.0, help="Seconds between long prompts (apart).")
    parser.add_argument("--seconds", type=float, default=45.0, help="Length of each run (apart).")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        WHAT[given.what](Bench(given, Path(directory)))
