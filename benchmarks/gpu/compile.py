# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.compile`: do all kernels compile for a GPU that is not here, and fit its shared memory?

Triton's interpreter runs what no compiler would take, so this is the other half of testing kernels without a GPU. Every
kernel is launched on tensors without memory, in the shapes of real models, at a driver that compiles and does nothing
else. One line per compiled kernel; exit code 1 if one does not compile or does not fit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import imports, kinds
from benchmarks.gpu.blanks import META, Launch, attention_metadata, empty, packed
from benchmarks.gpu.shapes import GEMMA_2B, LLAMA_8B, QWEN_05B, Shape
from quire.kernels.linear import PackedWeight, WeightScheme
from quire.kernels.low_rank import LowRankStacks

NUM_PROCESSORS = 132


@dataclass(frozen=True)
class Architecture:
    """Target that kernels are compiled for."""

    backend: str
    target: int | str
    warp_size: int
    shared_bytes: int
    """That a program may use."""


ARCHITECTURES = {
    "sm_80": Architecture("cuda", 80, 32, 166_912),
    "sm_90": Architecture("cuda", 90, 32, 232_448),
    "gfx942": Architecture("hip", "gfx942", 64, 65_536),
}


@dataclass
class Compiler:
    """Stands in for a driver, and collects what was compiled."""

    architecture: Architecture
    seen: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.architecture.backend, self.architecture.target, self.architecture.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def run(self, original: Callable[..., Any]) -> Callable[..., None]:
        """The method that launches a kernel, replaced by one that compiles it."""

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
            started = time.perf_counter()
            compiled = original(kernel, *args, grid=grid, warmup=True, **options)
            if compiled is not None and compiled.hash not in self.seen:
                self.seen.add(compiled.hash)
                self._report(kernel.__name__, compiled, time.perf_counter() - started)

        return compile_only

    def _report(self, name: str, compiled: Any, seconds: float) -> None:
        shared = compiled.metadata.shared
        text = compiled.asm.get("ptx") or compiled.asm.get("amdgcn") or ""
        units = next((unit for unit in ("wgmma", "mma.sync", "v_mfma") if unit in text), "-")
        line = (
            f"{name:24} {seconds:5.1f} s  {shared:7} B shared  {compiled.metadata.num_warps:2} warps  {units}"
        )
        self.lines.append(line)
        if shared > self.architecture.shared_bytes:
            self.failures.append(f"{name}: {shared} bytes of shared memory")


def compile_all(launches: Sequence[Launch], compiler: Compiler) -> None:
    """Compile what the launches launch; what is wrong with one does not stop the others.

    From then on, Triton launches nothing in this process.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(compiler)
    JITFunction.run = compiler.run(JITFunction.run)
    for name, launch in launches:
        before = len(compiler.lines)
        try:
            launch()
        except Exception as error:  # a compiler's errors have no common class
            compiler.failures.append(f"{name}: {type(error).__name__}: {error}")
        print("\n".join([name, *(f"    {line}" for line in compiler.lines[before:])]), flush=True)


def all_launches(*, every_shape: bool = True) -> Iterator[Launch]:
    """Every kernel, in the shapes of one model or of all."""
    shapes = (LLAMA_8B, QWEN_05B, GEMMA_2B) if every_shape else (LLAMA_8B,)
    for shape in shapes:
        yield from _rowwise(shape)
        yield from _attention(shape)
    yield from _attention(LLAMA_8B, torch.float8_e4m3fn)
    yield from _encoder_attention()
    yield from _linears(LLAMA_8B)
    yield from _adapters(LLAMA_8B)
    yield from kinds.launches()
    yield from _sampling(LLAMA_8B)
    yield from _batch()


def _rowwise(shape: Shape) -> Iterator[Launch]:
    from quire.kernels.triton import batch, elementwise

    x, gated, weight = empty(5, shape.hidden), empty(5, 2 * shape.intermediate), empty(shape.hidden)
    ids = empty(5, dtype=torch.int64)
    yield f"{shape.name}: rms_norm", lambda: elementwise.rms_norm(x, weight, 1e-6)
    yield f"{shape.name}: fused_add_rms_norm", lambda: elementwise.fused_add_rms_norm(x, x, weight, 1e-6)
    yield f"{shape.name}: layer_norm", lambda: elementwise.layer_norm(x, weight, weight, 1e-6)
    yield f"{shape.name}: activate, relu", lambda: elementwise.activate(gated, "relu")
    yield f"{shape.name}: silu_and_mul", lambda: elementwise.silu_and_mul(gated)
    yield f"{shape.name}: gelu_and_mul", lambda: elementwise.gelu_and_mul(gated)
    yield f"{shape.name}: gelu_and_mul, tanh", lambda: elementwise.gelu_and_mul(gated, "tanh")
    yield f"{shape.name}: rms_norm_fp8", lambda: elementwise.rms_norm_fp8(x, weight, 1e-6)
    yield (
        f"{shape.name}: fused_add_rms_norm_fp8",
        lambda: elementwise.fused_add_rms_norm_fp8(x, x, weight, 1e-6),
    )
    yield f"{shape.name}: silu_and_mul_fp8", lambda: elementwise.silu_and_mul_fp8(gated)
    yield f"{shape.name}: gelu_and_mul_fp8", lambda: elementwise.gelu_and_mul_fp8(gated)
    yield f"{shape.name}: gelu_and_mul_fp8, tanh", lambda: elementwise.gelu_and_mul_fp8(gated, "tanh")
    yield f"{shape.name}: embedding", lambda: elementwise.embedding(ids, empty(shape.vocab, shape.hidden))
    pairs, blocks = empty(3, 2, dtype=torch.int64), empty(9, 2, 16, 64)
    yield f"{shape.name}: copy_blocks", lambda: batch.copy_blocks(blocks, blocks, pairs)


def _attention(shape: Shape, cache_dtype: torch.dtype = torch.bfloat16) -> Iterator[Launch]:
    """The write of keys and values, and every launch shape of attention."""
    from quire.kernels.triton import attention, rotary

    sizes = (100, shape.kv_heads, 16, shape.head_size)
    keys, values = empty(*sizes, dtype=cache_dtype).transpose(2, 3), empty(*sizes, dtype=cache_dtype)
    name = f"{shape.name}, {str(cache_dtype).removeprefix('torch.')} cache"

    def write() -> None:
        parts = [shape.heads * shape.head_size, *[shape.kv_heads * shape.head_size] * 2]
        views = [part.unflatten(1, (-1, shape.head_size)) for part in empty(5, shape.qkv).split(parts, 1)]
        positions, table = empty(5, dtype=torch.int64), empty(4096, shape.head_size, dtype=torch.float32)
        norms, args = [empty(shape.head_size)] * 2, (positions, *views, table, keys, values, positions)
        rotary.rotary_and_write_kv(*args)
        rotary.rotary_and_write_kv(*args, False, *norms, 1e-6)
        rotary.write_kv(*views[1:], keys, values, positions)

    yield f"{name}: rotary_and_write_kv, without and with norms", write
    batches = {"prompts": [700, 30], "short chunks": [3, 1], "decode": [1], "decode, 256": [1] * 256}
    for what, query_lens in batches.items():
        for kind in ("paged_attention", "invariant_paged_attention"):
            function = getattr(attention, kind)
            yield f"{name}: {kind}, {what}", _call(shape, function, keys, values, query_lens)
            more = {"sinks": empty(shape.heads), "attention_chunk": 700, "sliding_window": None}
            run = _call(shape, function, keys, values, query_lens, **more)
            yield f"{name}: {kind}, {what}, sinks and chunks", run


def _encoder_attention() -> Iterator[Launch]:
    """BERT's heads, and EmbeddingGemma's."""
    from quire.kernels.triton.bidirectional import bidirectional_attention

    features: dict[str, dict[str, Any]] = {"no features": {}}
    features["all features"] = {
        "window": 65,
        "alibi_slopes": empty(12),
        "relative_bias": empty(12, 1023, dtype=torch.float32),
    }
    for name, options in features.items():
        rows = empty(730, 36, 64).chunk(3, 1)
        yield (
            f"encoder: {name}",
            lambda rows=rows, options=options: bidirectional_attention(
                *rows, attention_metadata([700, 30]), 0.125, **options
            ),
        )
    grouped = empty(730, 5, 256).split([3, 1, 1], 1)
    yield (
        "encoder: heads of 256",
        lambda: bidirectional_attention(*grouped, attention_metadata([700, 30]), 0.1, window=257),
    )


def _call(
    shape: Shape,
    function: Callable[..., Tensor],
    keys: Tensor,
    values: Tensor,
    query_lens: list[int],
    **more: Any,
) -> Callable[[], Tensor]:
    q = empty(sum(query_lens), shape.heads, shape.head_size)
    features = {"sliding_window": shape.window, "soft_cap": shape.soft_cap} | more
    return lambda: function(q, keys, values, attention_metadata(query_lens), 0.1, **features)


def _linears(shape: Shape) -> Iterator[Launch]:
    from quire.kernels.triton import linear

    schemes = {
        "int8": WeightScheme("int8"),
        "int4": WeightScheme("int4", 32),
        "int4 with zero points": WeightScheme("int4", 128, symmetric=False),
        "fp8": WeightScheme("fp8", vendor=False),
    }
    for name, scheme in schemes.items():
        for matrix in ("o", "gate up"):
            weight = packed(scheme, *shape.matrices[matrix])
            for rows in (1, 40):
                run = _product(linear.packed_linear, rows, weight)
                yield f"{shape.name}: {name} linear, {matrix}, {rows} rows", run
    codes = {
        "int8 in groups": WeightScheme("int8", 32),
        "int4 in small groups": WeightScheme("int4", 16),
        "nf4": WeightScheme("nf4", 64),
    }
    for name, scheme in codes.items():
        weight = packed(scheme, *shape.matrices["o"])
        yield f"{shape.name}: {name} linear", _product(linear.packed_linear, 1, weight)
    for name, scheme in {"int8": schemes["int8"], "fp8": schemes["fp8"]}.items():
        run = _product(
            partial(linear.packed_linear, dtype=torch.float32), 4, packed(scheme, shape.vocab, shape.hidden)
        )
        yield f"{shape.name}: {name} head", run
    for name, scheme in {"float": WeightScheme(), **schemes}.items():
        invariant = WeightScheme(scheme.kind, scheme.group_size, scheme.symmetric, invariant=True)
        run = _product(linear.packed_linear, 40, packed(invariant, *shape.matrices["down"]))
        yield f"{shape.name}: {name} linear, batch-invariant", run
    ids = empty(5, dtype=torch.int64)
    for name in ("int8", "int4"):
        table = packed(schemes[name], shape.vocab, shape.hidden)
        yield f"{shape.name}: {name} embedding", lambda table=table: linear.packed_embedding(ids, table)
        run = _product(linear.packed_linear, 300, packed(schemes[name], *shape.matrices["o"]))
        yield f"{shape.name}: {name} linear, many rows", run


def _product(function: Callable[..., Tensor], rows: int, weight: PackedWeight) -> Callable[[], Tensor]:
    x, bias = empty(rows, weight.inputs), empty(weight.outputs, dtype=torch.float32)
    return lambda: function(x, weight, bias)


def _adapters(shape: Shape) -> Iterator[Launch]:
    """Yield the adapter launches of a layer that is one module, and of several merged ones."""
    from quire.kernels.triton import low_rank

    slots, sizes = (
        empty(40, dtype=torch.int32),
        [shape.heads * shape.head_size, *[shape.kv_heads * shape.head_size] * 2],
    )
    for name, parts in {"o": [shape.hidden], "qkv": sizes}.items():
        stacks = LowRankStacks.empty(4, parts, shape.hidden, 16, torch.bfloat16, META)
        args = empty(40, sum(parts)), empty(40, shape.hidden), slots, stacks
        yield f"{shape.name}: low_rank_linear, {name}", partial(low_rank.low_rank_linear, *args)


def _sampling(shape: Shape) -> Iterator[Launch]:
    from quire.kernels.attention_metadata import ANY_LIMITS, NO_LIMITS, SamplingLimits
    from quire.kernels.triton import logprobs, sampling
    from quire.kernels.triton import logprobs as tail

    logits, ids = empty(4, shape.vocab, dtype=torch.float32), empty(4, dtype=torch.int64)
    settings = empty(4, 4, dtype=torch.float64)
    yield "unusable_rows", lambda: tail.unusable_rows(logits)
    yield "clear_rows", lambda: tail.clear_rows(logits, empty(4, dtype=torch.bool))
    words = empty(4, -(-shape.vocab // 32), dtype=torch.int32)
    yield "mask_logits", lambda: tail.mask_logits(logits, ids, words)
    places, factors = empty(4, 4, dtype=torch.int64), empty(4, 3, dtype=torch.float64)
    rows = empty(4, 900, dtype=torch.int32)
    yield "penalize_rows", lambda: logprobs.penalize_rows(logits, rows, places, factors, 900)
    limits = {"none": NO_LIMITS, "min_p": SamplingLimits(top_k=False, top_p=False), "all": ANY_LIMITS}
    for name, used in limits.items():
        sample = partial(sampling.sample_tokens, logits, settings, empty(4, 2, dtype=torch.int64), used)
        yield f"sample_tokens, limits: {name}", sample
    yield "sample_tokens, greedy", lambda: sampling.sample_tokens(logits, settings, None, NO_LIMITS)
    for num_top in (0, 5, 20):
        yield f"token_logprobs, {num_top}", partial(logprobs.token_logprobs, logits, ids, num_top)


def _batch() -> Iterator[Launch]:
    from quire.kernels.triton import batch

    rows, staged = empty(8, 4096, dtype=torch.int32), empty(400, dtype=torch.int32)
    step = batch.StagedStep(staged, 3, 2)
    ids, counts = empty(64, dtype=torch.int64), empty(9, dtype=torch.int32)
    yield "write_segments", lambda: batch.write_segments(rows, staged, 1, 2, 30)
    yield "prepare_tokens", lambda: batch.prepare_tokens(ids, ids, counts, counts, step, rows, 4, 16)
    yield "prepare_blocks", lambda: batch.prepare_blocks(ids, rows, step, rows, 16, 4, 16, 900)
    yield "keep_sampled", lambda: batch.keep_sampled(rows, ids, step)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compile", description=__doc__)
    found.add_argument("--arch", choices=ARCHITECTURES, default="sm_90")
    found.add_argument("--quick", action="store_true", help="One model's shapes instead of all.")
    found.add_argument("--part", type=int, default=0, help="Which of --parts to compile, from 0 on.")
    found.add_argument("--parts", type=int, default=1, help="Into how many to divide the launches.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile everything; returns the exit code."""
    args = parser().parse_args(arguments)
    absent = imports.missing(imports.KERNELS)
    if absent:
        print(imports.advice(absent), file=sys.stderr)
        return 2
    from quire.kernels.triton import launch

    launch.num_processors = lambda device: NUM_PROCESSORS  # type: ignore[assignment]
    compiler = Compiler(ARCHITECTURES[args.arch])
    launches = list(all_launches(every_shape=not args.quick))
    compile_all(launches[args.part :: args.parts], compiler)
    print(f"{len(compiler.lines)} kernels compiled for {args.arch}, {len(compiler.failures)} failures")
    for failure in compiler.failures:
        print(f"FAIL {failure}", file=sys.stderr)
    return 1 if compiler.failures else 0


if __name__ == "__main__":
    sys.exit(main())
