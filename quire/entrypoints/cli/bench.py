# SPDX-License-Identifier: Apache-2.0
"""`quire bench throughput | latency | speculation | startup | serve | kernels`."""

from __future__ import annotations

import asyncio
import json
import math
import resource
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quire.bench import latency as latency_bench
from quire.bench import serve as serve_bench
from quire.bench import speculation as speculation_bench
from quire.bench import startup as startup_bench
from quire.bench import throughput as throughput_bench
from quire.bench.backends import BACKENDS, Backend
from quire.bench.workload import random_prompts
from quire.entrypoints.cli.chat import bearer_token
from quire.entrypoints.cli.client import ServerClient
from quire.entrypoints.cli.options import EngineCommand, HumanInt, Rate, TranslatedCommand, engine_config
from quire.errors import ConfigError
from quire.vllm_names.bench_options import BENCH_OPTIONS
from quire.vllm_names.command_line import FLAGS

REQUEST_TIMEOUT_S = 3600.0
ENGINE_FLAGS = {**BENCH_OPTIONS, **FLAGS}

COUNT = HumanInt(minimum=1)
COUNT_OR_ZERO = HumanInt(minimum=0)


@click.group()
def bench() -> None:
    """Measure throughput, latency, starting, a running server or the CPU kernels."""


def _json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    option = click.option(
        "--json", "json_file", metavar="FILE", help="Write the result to this file as JSON."
    )
    return option(command)


@bench.command(cls=EngineCommand, vllm_flags=ENGINE_FLAGS)
@click.option(
    "--backend", type=click.Choice(list(BACKENDS)), default="quire", show_default=True, help="Engine."
)
@click.option(
    "--num-prompts", type=COUNT, default=1000, show_default=True, help="Requests, all given at once."
)
@click.option("--input-len", type=COUNT, default=64, show_default=True, help="Random tokens per prompt.")
@click.option("--output-len", type=COUNT, default=32, show_default=True, help="Tokens generated per prompt.")
@click.option(
    "--compare-hf", is_flag=True, help="Measure quire and transformers in turn and print the ratio."
)
@click.option(
    "--repeats", type=COUNT, default=3, show_default=True, help="Measurements of each for --compare-hf."
)
@_json_option
def throughput(
    backend: str,
    num_prompts: int,
    input_len: int,
    output_len: int,
    compare_hf: bool,
    repeats: int,
    json_file: str | None,
    **params: Any,
) -> None:
    """Time a batch of random prompts, offline.

    Every prompt gets exactly the output length asked for, greedily. The backend hf is `generate` of
    transformers in float32 with all prompts in one batch.
    """
    config = engine_config(params)
    names = ["quire", "hf"] if compare_hf else [backend]
    engines = [BACKENDS[name](config) for name in names]
    num_batches = repeats if compare_hf else 1
    batches = _batches(num_batches, num_prompts, input_len, engines[0].vocab_size, config.model.seed)
    for engine in engines:
        throughput_bench.warm_up(engine, batches[0])
    if compare_hf:
        comparison = throughput_bench.compare(engines[0], engines[1], batches, output_len)
        _report(comparison.lines(), comparison.as_json(), json_file)
    else:
        result = throughput_bench.measure(engines[0], batches[0], output_len)
        _report(result.lines(), result.as_json(), json_file)


@bench.command(cls=EngineCommand, vllm_flags=ENGINE_FLAGS)
@click.option("--input-len", type=COUNT, default=32, show_default=True, help="Random tokens per prompt.")
@click.option("--output-len", type=COUNT, default=128, show_default=True, help="Tokens generated per prompt.")
@click.option("--batch-size", type=COUNT, default=8, show_default=True, help="Prompts per batch.")
@click.option(
    "--num-iters-warmup", type=COUNT_OR_ZERO, default=10, show_default=True, help="Batches before timing."
)
@click.option("--num-iters", type=COUNT, default=30, show_default=True, help="Batches timed.")
@_json_option
def latency(
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters_warmup: int,
    num_iters: int,
    json_file: str | None,
    **params: Any,
) -> None:
    """Time one batch of random prompts again and again, offline."""
    config = engine_config(params)
    engine = BACKENDS["quire"](config)
    num_batches = num_iters_warmup + num_iters
    batches = _batches(num_batches, batch_size, input_len, engine.vocab_size, config.model.seed)
    result = latency_bench.measure(engine, batches[:num_iters_warmup], batches[num_iters_warmup:], output_len)
    _report(result.lines(), result.as_json(), json_file)


@bench.command(cls=EngineCommand, vllm_flags=ENGINE_FLAGS)
@click.option("--input-len", type=COUNT, default=32, show_default=True, help="Random tokens per prompt.")
@click.option("--output-len", type=COUNT, default=64, show_default=True, help="Tokens generated per prompt.")
@click.option("--batch-size", type=COUNT, default=1, show_default=True, help="Prompts per batch.")
@click.option("--num-iters", type=COUNT, default=5, show_default=True, help="Batches timed.")
@click.option("--num-drafts", type=COUNT, default=4, show_default=True, help="Draft tokens per step.")
@click.option(
    "--acceptance-rate",
    "rates",
    type=click.FloatRange(0.0, 1.0),
    multiple=True,
    help="Share of drafts that are accepted; may be given several times.  [default: 0, 0.5, 0.8, 1]",
)
@click.option("--adaptive", is_flag=True, help="Adapt the number of draft tokens to the acceptance rate.")
@_json_option
def speculation(
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters: int,
    num_drafts: int,
    rates: Sequence[float],
    adaptive: bool,
    json_file: str | None,
    **params: Any,
) -> None:
    """Time batches of random prompts with and without drafts of which a given share is accepted, offline."""
    config = engine_config(params)

    def make(recorded: str, rate: float) -> Backend:
        given = {"method": "recorded", "model": recorded, "synthetic_acceptance_rate": rate}
        given |= {"num_speculative_tokens": num_drafts, "adaptive": adaptive}
        return BACKENDS["quire"](config.evolve(speculative_config=given))

    plain = BACKENDS["quire"](config.evolve(speculative_config={}))
    batches = _batches(num_iters, batch_size, input_len, plain.vocab_size, config.model.seed)
    result = speculation_bench.measure(plain, make, batches, output_len, rates or (0.0, 0.5, 0.8, 1.0))
    _report(result.lines(), result.as_json(), json_file)


@bench.command(cls=EngineCommand, vllm_flags=ENGINE_FLAGS)
@click.option(
    "--num-iters-warmup", type=COUNT_OR_ZERO, default=1, show_default=True, help="Starts before timing."
)
@click.option("--num-iters", type=COUNT, default=3, show_default=True, help="Starts timed.")
@_json_option
def startup(num_iters_warmup: int, num_iters: int, json_file: str | None, **params: Any) -> None:
    """Time the way from the command to the first token, in a fresh process each time."""
    result = startup_bench.measure(engine_config(params), num_iters_warmup, num_iters)
    _report(result.lines(), result.as_json(), json_file)


@bench.command(cls=TranslatedCommand, vllm_flags=BENCH_OPTIONS)
@click.option(
    "--base-url", help="Server to load, such as http://localhost:8000; instead of --host and --port."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Host of the server.")
@click.option("--port", type=COUNT, default=8000, show_default=True, help="Port of the server.")
@click.option("--endpoint", default="/v1/completions", show_default=True, help="Or /v1/chat/completions.")
@click.option("--model", help="Model to ask for; default: the server's first.")
@click.option("--api-key", help="Bearer token; default: QUIRE_API_KEY or OPENAI_API_KEY.")
@click.option("--num-prompts", type=COUNT, default=1000, show_default=True, help="Requests to send.")
@click.option(
    "--random-input-len", type=COUNT, default=1024, show_default=True, help="Random tokens per prompt."
)
@click.option(
    "--random-output-len", type=COUNT, default=128, show_default=True, help="Most tokens generated."
)
@click.option(
    "--request-rate", type=Rate(), default=math.inf, show_default=True, help="Poisson arrivals per second."
)
@click.option(
    "--max-concurrency", type=COUNT, help="Maximum requests in flight; later ones wait in the client."
)
@click.option(
    "--num-warmups", type=COUNT_OR_ZERO, default=1, show_default=True, help="Requests before timing."
)
@click.option("--temperature", type=click.FLOAT, default=0.0, show_default=True, help="Sampling temperature.")
@click.option("--ignore-eos", is_flag=True, help="Always generate --random-output-len tokens.")
@click.option(
    "--seed", type=COUNT_OR_ZERO, default=0, show_default=True, help="Seeds prompts and arrival times."
)
@_json_option
def serve(
    base_url: str | None,
    host: str,
    port: int,
    model: str | None,
    api_key: str | None,
    json_file: str | None,
    **load: Any,
) -> int:
    """Load a running server with random prompts and measure its answers."""
    plan = serve_bench.LoadPlan(
        input_len=load.pop("random_input_len"), output_len=load.pop("random_output_len"), **load
    )
    _raise_open_file_limit()
    client = ServerClient(base_url or f"http://{host}:{port}", bearer_token(api_key), REQUEST_TIMEOUT_S)
    result = asyncio.run(serve_bench.run_load(client, model, plan))
    _report(result.lines(), result.as_json(), json_file)
    for message, count in serve_bench.error_counts(result.records).items():
        click.echo(f"{count} failed: {message}", err=True)
    return 1 if result.failed else 0


@bench.command()
@click.option(
    "--suite", "suites", multiple=True, help="linear or attention; default: both. May be given several times."
)
@click.option(
    "--rows", type=COUNT, multiple=True, help="Rows of activations of a linear; may be given several times."
)
@click.option(
    "--weights",
    multiple=True,
    help="Weight format of a linear, such as bfloat16 or int8-precise; may be given several times.",
)
@click.option("--threads", type=COUNT, help="Compute threads; default: one per physical core.")
@click.option(
    "--tape", is_flag=True, help="Measure a decode step of --rows requests instead, kernel by kernel."
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --tape: a directory with the model's config.json; the weights are random.",
)
@click.option("--quick", is_flag=True, help="The first cases of each suite only, each timed a few times.")
@_json_option
def kernels(
    suites: tuple[str, ...],
    rows: tuple[int, ...],
    weights: tuple[str, ...],
    threads: int | None,
    tape: bool,
    model: Path | None,
    quick: bool,
    json_file: str | None,
) -> None:
    """Measure the CPU kernels at the shapes of real models, as shares of this machine's measured limits."""
    from quire.bench import kernels as kernels_bench
    from quire.bench import step_profile
    from quire.kernels.cpu.library import set_num_threads

    _check_names("--suite", suites, kernels_bench.SUITES)
    _check_names("--weights", weights, step_profile.ENGINE if tape else kernels_bench.WEIGHTS)
    weights = weights or ("bfloat16", "int8", "int4")
    if tape:
        if suites:
            raise ConfigError(
                "--suite selects single kernels, and --tape the kernels of a step; give only one of them"
            )
        steps = step_profile.measure(
            weights, rows or step_profile.ROWS, model=model, threads=threads, quick=quick
        )
        _report(steps.lines(), steps.as_json(), json_file)
        return
    if model is not None:
        raise ConfigError("--model needs --tape, whose step it selects")
    if threads is not None:
        set_num_threads(threads)
    result = kernels_bench.measure(
        suites or list(kernels_bench.SUITES), rows or kernels_bench.ROWS, weights, quick=quick
    )
    _report(result.lines(), result.as_json(), json_file)


def _check_names(option: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} is {name!r}; it must be one of {', '.join(known)}")


def _batches(
    num_batches: int, num_prompts: int, num_tokens: int, vocab_size: int, seed: int
) -> list[list[list[int]]]:
    """Return batches without common prompts, so that the prefix cache has no effect."""
    prompts = random_prompts(num_batches * num_prompts, num_tokens, range(vocab_size), seed)
    return [prompts[start : start + num_prompts] for start in range(0, len(prompts), num_prompts)]


def _report(lines: Sequence[str], result: Mapping[str, object], json_file: str | None) -> None:
    click.echo("\n".join(lines))
    if json_file is not None:
        try:
            Path(json_file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json_file}: {error.strerror}") from error


def _raise_open_file_limit() -> None:
    """Raise the open-file limit to allow one connection per request in flight; the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
