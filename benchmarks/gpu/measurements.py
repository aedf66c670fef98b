# SPDX-License-Identifier: Apache-2.0
"""Measurements: the rows of the table, grouped by engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.gpu import kernel_speed, profiles, speed, start
from benchmarks.gpu.bench import Measurement
from benchmarks.gpu.engine import engine
from benchmarks.gpu.limits import BFLOAT16, Limits, Weights
from benchmarks.gpu.rows import Goal, Row
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_05B, TINY, TINY_TIED, Shape
from benchmarks.gpu.target import Target


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements, in tokens, requests and steps."""

    context: int
    long_context: int
    batches: tuple[int, int]
    chunk: int
    num_prompts: int
    num_steps: int
    load: tuple[int, int, int]
    """Requests, prompt tokens and output tokens of the full load."""


FULL = Sizes(1024, 16384, (64, 256), 2048, 16, 100, (768, 250, 200))
SMALL = Sizes(20, 60, (2, 3), 32, 3, 4, (5, 9, 6))


@dataclass(frozen=True)
class Bench:
    """Context shared by all measurements."""

    target: Target
    limits: Limits
    scratch: Path

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.target.tiny else FULL

    @property
    def large(self) -> Shape:
        return TINY if self.target.tiny else LLAMA_8B

    @property
    def small(self) -> Shape:
        return TINY_TIED if self.target.tiny else QWEN_05B

    def engine(self, shape: Shape, **args: Any) -> Any:
        """An engine as a user with speed in mind starts it: overlapped steps, CUDA graphs."""
        defaults: dict[str, Any] = {
            "dtype": "bfloat16",
            "async_scheduling": True,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": self.sizes.chunk,
            "max_num_seqs": min(self.sizes.batches[1], self.sizes.chunk),
            "max_model_len": min(self.sizes.long_context + 1024, 32768),
        }
        return engine(self.target, shape.write(self.scratch / shape.name), **defaults | args)

    def prompts(self, shape: Shape, count: int, length: int, seed: int) -> list[list[int]]:
        return speed.random_prompts(count, length, shape.vocab, seed)


QUANTIZED: dict[str, tuple[dict[str, Any], Weights]] = {
    "int8": ({"quantization": "int8"}, Weights(1.0, 1.0)),
    "int4": ({"quantization": "int4"}, Weights(0.5 + 2 / 32, 1.0)),
    "fp8": ({"quantization": "fp8"}, Weights(1.0, 1.0)),
    "fp8 by Triton": ({"quantization": "fp8", "quantization_config": {"gemm": "triton"}}, Weights(1.0, 1.0)),
}
"""What is asked for, and what a weight then takes: a head is in int8, and int4 has a scale of 16 bits for every 32."""
QWEN_DEFAULTS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "seed": 0}
"""How Qwen 2.5 asks to be sampled from in its generation_config.json, and the seed that a front end gives."""


def measurements(bench: Bench) -> list[Measurement]:
    """In order of importance: a run that is cut short has the first."""
    on_gpu = bench.target.is_gpu
    variants = {"batch-invariant": ({"batch_invariant": True}, BFLOAT16)} | QUANTIZED
    usable = variants if on_gpu else {name: variants[name] for name in ("int8", "int4")}
    kernels = (bench.target, bench.limits, bench.large)
    return [
        Measurement("8B", partial(_main_table, bench)),
        Measurement("8B, mixed and long", partial(_mixed_and_long, bench)),
        Measurement("attention", partial(kernel_speed.attention_rows, *kernels)),
        Measurement("linears", partial(kernel_speed.linear_rows, *kernels)),
        Measurement("0.5B", partial(_small_model, bench)),
        Measurement("sampling", partial(_sampling, bench)),
        Measurement("profile", partial(_profile, bench)),
        Measurement("start", partial(_start, bench)),
        *(Measurement(name, partial(_variant, bench, name, *what)) for name, what in usable.items()),
    ]


def _main_table(bench: Bench) -> Iterator[Row]:
    sizes, shape = bench.sizes, bench.large
    with bench.engine(shape) as running:
        yield from _batch_1(bench, running)
        for seed, (batch, goal) in enumerate(zip(sizes.batches, (75, 65), strict=True)):
            yield _decode_row(bench, running, shape, batch, sizes.context, seed, Goal("percent", goal))
        yield _prefill_row(bench, running, shape, Goal("percent", 60))
        count, length, num_tokens = sizes.load
        rate = speed.output_rate(running, bench.prompts(shape, count, length, 9), num_tokens)
        what = f"{shape.name}, full load, {length} in, {num_tokens} out"
        yield Row(what, "tok/s", rate, goal=Goal("at least", 11_000))


def _batch_1(bench: Bench, running: Any) -> Iterator[Row]:
    """A step of one request, and what each token of its context adds."""
    sizes, shape = bench.sizes, bench.large
    times = []
    for length in (sizes.context // 8, sizes.long_context):
        prompts = bench.prompts(shape, 1, length, length)
        times.append(speed.decode_step(running, prompts, sizes.num_steps))
    (short_s, short), (long_s, long) = times
    limit = bench.limits.decode_s(shape, 1, short)
    yield Row(f"{shape.name}, decode, batch 1", "ms", 1e3 * short_s, 1e3 * limit, Goal("at most", 6.4))
    slope, bound = (
        (long_s - short_s) / (long - short),
        bench.limits.context_bytes(shape, 1) / bench.limits.bytes_per_s,
    )
    yield Row(f"{shape.name}, per context token", "ms", 1e3 * slope, 1e3 * bound, Goal("at most", 5e-5))


def _decode_row(
    bench: Bench,
    running: Any,
    shape: Shape,
    batch: int,
    context: int,
    seed: int,
    goal: Goal | None = None,
    weights: Weights = BFLOAT16,
    name: str = "",
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> Row:
    prompts = bench.prompts(shape, batch, context, seed)
    seconds, mean = speed.decode_step(running, prompts, bench.sizes.num_steps, **sampling)
    limit = bench.limits.decode_s(shape, batch, mean, weights)
    what = f"{shape.name}{name}, decode, batch {batch}, {context} in context"
    return Row(what, "ms", 1e3 * seconds, 1e3 * limit, goal)


def _prefill_row(
    bench: Bench,
    running: Any,
    shape: Shape,
    goal: Goal | None = None,
    name: str = "",
    *,
    count: int = 0,
    length: int = 0,
) -> Row:
    """As many prompts of a chunk each, unless it is said otherwise."""
    count, length = count or bench.sizes.num_prompts, length or bench.sizes.chunk
    rate = speed.prefill_rate(running, bench.prompts(shape, count, length, 7))
    what = f"{shape.name}{name}, prompts of {length}"
    return Row(what, "tok/s", rate, bench.limits.prefill_tokens_per_s(shape, length), goal)


def _mixed_and_long(bench: Bench) -> Iterator[Row]:
    """Prompts beside requests that decode, long prompts, and a long request among short ones."""
    sizes, shape, limits = bench.sizes, bench.large, bench.limits
    batch, context, chunk = sizes.batches[0], sizes.context, sizes.chunk - sizes.batches[0]
    with bench.engine(shape, cuda_graph_capture="lazy") as running:
        chunks = bench.prompts(shape, sizes.num_prompts // 2 or 1, chunk, 3)
        seconds = speed.mixed_step(running, bench.prompts(shape, batch, context, 2), chunks)
        limit = max(limits.decode_s(shape, batch, context), chunk / limits.prefill_tokens_per_s(shape, chunk))
        what = f"{shape.name}, {batch} at {context} decode beside prompts of {chunk}"
        yield Row(what, "ms", 1e3 * seconds, 1e3 * limit)
        yield _prefill_row(bench, running, shape, count=2, length=sizes.long_context)
        long, *short = bench.prompts(shape, batch, sizes.long_context, 4)
        prompts = [long, *(prompt[: sizes.context // 8] for prompt in short)]
        seconds, mean = speed.decode_step(running, prompts, sizes.num_steps)
        what = f"{shape.name}, decode, 1 at {sizes.long_context} among {batch - 1} at {sizes.context // 8}"
        yield Row(what, "ms", 1e3 * seconds, 1e3 * limits.decode_s(shape, batch, mean))


def _small_model(bench: Bench) -> Iterator[Row]:
    """Measure a small model, whose steps show the host's time, with greedy and with Qwen's default sampling."""
    shape, sizes = bench.small, bench.sizes
    batch, context = sizes.batches[1], sizes.context // 8
    with bench.engine(shape) as running:
        yield _decode_row(bench, running, shape, 1, context, 0, Goal("at most", 1.3))
        yield _decode_row(bench, running, shape, batch, context, 1)
        yield _decode_row(
            bench, running, shape, batch, context, 1, name=", Qwen's sampling", sampling=QWEN_DEFAULTS
        )


def _profile(bench: Bench) -> Iterator[Row]:
    """Profile a decode step, and steps with prompts in them."""
    sizes, shape, target = bench.sizes, bench.large, bench.target
    batch, chunk = sizes.batches[0], sizes.chunk - sizes.batches[0]
    num_steps = 2 if target.tiny else 8
    with bench.engine(shape, cuda_graph_capture="lazy") as running:
        prompts, (prompt,) = bench.prompts(shape, batch, sizes.context, 5), bench.prompts(shape, 1, chunk, 6)
        with speed.decoding(running, prompts, 12 * num_steps) as requests:

            def decode(count: int) -> None:
                speed.generate(running, count * len(requests))

            def mix(count: int) -> None:
                others = [running.add(prompt, speed.greedy(1)) for _ in range(count)]
                while not all(other.token_ids for other in others):
                    running.step()

            yield from profiles.profile_rows(target, f"{batch} decode", decode, num_steps)
            yield from profiles.profile_rows(target, f"{batch} decode, prompts of {chunk}", mix, num_steps)


def _sampling(bench: Bench) -> Iterator[Row]:
    """Beside reading the logits once."""
    vocab = bench.small.vocab
    for batch in (1, bench.sizes.batches[1]):
        limit = batch * vocab * 4 / bench.limits.bytes_per_s
        for kind in speed.SAMPLING:
            seconds = speed.sampling_step(bench.target, kind, batch, vocab)
            yield Row(f"V = {vocab}, batch {batch}: {kind}", "us", 1e6 * seconds, 1e6 * limit)
        seconds = speed.logprobs_step(bench.target, 5, batch, vocab)
        yield Row(f"V = {vocab}, batch {batch}: 5 logprobs", "us", 1e6 * seconds, 1e6 * limit)


def _start(bench: Bench) -> Iterator[Row]:
    """Twice, because the first may read from the disk and compile kernels."""
    shape = bench.large
    directory = shape.write(bench.scratch / f"checkpoint {shape.name}")
    gigabytes = start.write_checkpoint(bench.target, directory) / 1e9
    for what, goal in (("first", None), ("again", Goal("at most", 12))):
        seconds = start.start_seconds(bench.target, directory, 60.0)
        yield Row(f"{shape.name}, {gigabytes:.1f} GB, process to ready, {what}", "s", seconds, goal=goal)


def _variant(bench: Bench, name: str, args: dict[str, Any], weights: Weights) -> Iterator[Row]:
    """Measure a variant of the large model."""
    shape, sizes = bench.large, bench.sizes
    with bench.engine(shape, cuda_graph_capture="lazy", **args) as running:
        for seed, (batch, context) in enumerate(((1, sizes.context // 8), (sizes.batches[0], sizes.context))):
            yield _decode_row(bench, running, shape, batch, context, seed, weights=weights, name=f", {name}")
        yield _prefill_row(bench, running, shape, name=f", {name}")
