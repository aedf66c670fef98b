"""What is measured: the rows of the table, by the engine that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import speed, start
from benchmarks.gpu.bench import Measurement
from benchmarks.gpu.engine import engine
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.rows import Goal, Row
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_05B, TINY, TINY_TIED, Shape
from benchmarks.gpu.target import Target


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

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
    """What all measurements know."""

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


def measurements(bench: Bench) -> list[Measurement]:
    """In order of importance: a run that is cut short has the first."""
    variants: dict[str, tuple[dict[str, Any], float]] = {
        "batch-invariant": ({"batch_invariant": True}, 2.0),
        "int8": ({"quantization": "int8"}, 1.0),
        "int4": ({"quantization": "int4"}, 0.5),
        "fp8": ({"quantization": "fp8"}, 1.0),
        "fp8 by Triton": ({"quantization": "fp8", "quantization_config": {"gemm": "triton"}}, 1.0),
    }
    if not bench.target.is_gpu:
        variants = {name: variants[name] for name in ("int8", "int4")}
    return [
        Measurement("8B", partial(_main_table, bench)),
        Measurement("0.5B", partial(_small_model, bench)),
        Measurement("sampling", partial(_sampling, bench)),
        Measurement("start", partial(_start, bench)),
        *(Measurement(name, partial(_variant, bench, name, *what)) for name, what in variants.items()),
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
    bytes_per_weight: float = 2.0,
    name: str = "",
) -> Row:
    prompts = bench.prompts(shape, batch, context, seed)
    seconds, mean = speed.decode_step(running, prompts, bench.sizes.num_steps)
    limit = bench.limits.decode_s(shape, batch, mean, bytes_per_weight)
    what = f"{shape.name}{name}, decode, batch {batch}, {context} in context"
    return Row(what, "ms", 1e3 * seconds, 1e3 * limit, goal)


def _prefill_row(bench: Bench, running: Any, shape: Shape, goal: Goal | None = None, name: str = "") -> Row:
    length = bench.sizes.chunk
    rate = speed.prefill_rate(running, bench.prompts(shape, bench.sizes.num_prompts, length, 7))
    what = f"{shape.name}{name}, prompts of {length}"
    return Row(what, "tok/s", rate, bench.limits.prefill_tokens_per_s(shape, length), goal)


def _small_model(bench: Bench) -> Iterator[Row]:
    shape = bench.small
    with bench.engine(shape) as running:
        yield _decode_row(bench, running, shape, 1, bench.sizes.context // 8, 0, Goal("at most", 1.3))


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


def _variant(bench: Bench, name: str, args: dict[str, Any], bytes_per_weight: float) -> Iterator[Row]:
    """What a variant costs or saves."""
    shape, sizes = bench.large, bench.sizes
    with bench.engine(shape, **args) as running:
        for seed, (batch, context) in enumerate(((1, sizes.context // 8), (sizes.batches[0], sizes.context))):
            yield _decode_row(
                bench,
                running,
                shape,
                batch,
                context,
                seed,
                bytes_per_weight=bytes_per_weight,
                name=f", {name}",
            )
        yield _prefill_row(bench, running, shape, name=f", {name}")
