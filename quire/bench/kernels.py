# SPDX-License-Identifier: Apache-2.0
"""Kernel benchmarks against the machine's limits: each op at the shapes of a real model.

Invariant: limits are measured in the same run, before the ops, with the same threads. An op's limit is the time of its
arithmetic or of its memory traffic at those rates, whichever is longer. Arithmetic counts as float32 multiply-adds,
also that of integers, which may therefore exceed its limit. Attention blocks are scattered over a pool larger than the
CPU caches. A new op is a function in `SUITES` that yields its cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice

import torch
from torch import Tensor

from quire.bench.workload import KernelCase, percentile
from quire.errors import ConfigError
from quire.kernels import cpu, ops
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.linear import FLOAT, PackedWeight, WeightScheme
from quire.progress import Progress

_POOL_BYTES = 96 * 2**20
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class AttentionShape:
    """Attention heads of a model."""

    q_heads: int
    kv_heads: int
    size: int

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}x{self.size}"


SHAPES = (AttentionShape(14, 2, 64), AttentionShape(32, 8, 128))  # Qwen 2 0.5B and Llama 3 8B
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
CONTEXTS = (512, 4096)
BATCHES = (1, 16)
PROMPTS = (512, 2048)


def attention_cases() -> Iterator[KernelCase]:
    """Yield decode steps of some batches and contexts, then prefills, for all cache types."""
    for shape in SHAPES:
        for name, dtype in DTYPES.items():
            for context in CONTEXTS:
                for batch in BATCHES:
                    yield attention_case(f"decode@{context} {shape} {name}", shape, dtype, batch, 1, context)
            for prompt in PROMPTS:
                yield attention_case(f"prefill {shape} {name}", shape, dtype, 1, prompt, prompt)


def attention_case(
    name: str, shape: AttentionShape, dtype: torch.dtype, batch: int, queries: int, context: int
) -> KernelCase:
    """Return a case with equally many queries and cached tokens, queries included, for all requests."""
    blocks_each = -(-context // _BLOCK_SIZE)
    stored = shape.size + (4 if dtype == torch.int8 else 0)
    block_bytes = 2 * shape.kv_heads * _BLOCK_SIZE * stored * dtype.itemsize
    turns = max(1, _POOL_BYTES // (batch * blocks_each * block_bytes))
    keys, values = _pool(turns * batch * blocks_each, shape.kv_heads, stored, dtype)
    order = torch.randperm(len(keys), dtype=torch.int32)
    turn = cycle([_metadata(table, queries, context) for table in order.view(turns, batch, blocks_each)])
    q = torch.randn(batch * queries, shape.q_heads, shape.size)
    pairs = batch * sum(range(context - queries + 1, context + 1))
    return KernelCase(
        name=name,
        rows=batch * queries,
        run=lambda: ops.paged_attention(q, keys, values, next(turn), shape.size**-0.5),
        flops=4.0 * pairs * shape.q_heads * shape.size,
        num_bytes=batch * blocks_each * block_bytes + 2.0 * q.nbytes,
    )


def _pool(blocks: int, heads: int, stored: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return constant keys and values. The bytes of an int8 cache also read as a scale of 0.01."""
    fill = 0x3C if dtype == torch.int8 else 0.5
    return (
        torch.full((blocks, heads, stored, _BLOCK_SIZE), fill, dtype=dtype),
        torch.full((blocks, heads, _BLOCK_SIZE, stored), fill, dtype=dtype),
    )


def _metadata(tables: Tensor, queries: int, context: int) -> AttentionMetadata:
    batch = len(tables)
    return AttentionMetadata(
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32) * queries,
        seq_lens=torch.full((batch,), context, dtype=torch.int32),
        block_tables=tables.contiguous(),
        slot_mapping=torch.full((batch * queries,), -1),
        max_query_len=queries,
        max_seq_len=context,
    )


ROWS = (1, 4, 16, 64, 512)
MIN_SECONDS = 0.2
QUICK_CASES = 2  # cases per suite in a quick run
_COLD_BYTES = 96 * 2**20  # total size of the weight copies used in turn, so that none is in a CPU cache
_MAX_LOGIT_ROWS = 64


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; the default is Qwen 2 0.5B."""

    hidden: int = 896
    qkv: int = 1152
    intermediate: int = 4864
    vocab: int = 151936


@dataclass(frozen=True)
class MachineLimits:
    """Rates of the machine, per second."""

    threads: int
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class KernelResult:
    """Result of one case: median seconds, rates per second, and the fraction of the limit."""

    name: str
    rows: int
    seconds: float
    flops: float
    bandwidth: float
    of_limit: float
    bound: str

    def line(self) -> str:
        """Return the result as text."""
        return (
            f"{self.name:26} {self.rows:5} {self.seconds * 1e6:11.1f} {self.flops / 1e9:9.1f} "
            f"{self.bandwidth / 1e9:8.1f}   {self.of_limit:4.0%} of {self.bound}"
        )


@dataclass(frozen=True)
class KernelsResult:
    """Limits and all results."""

    limits: MachineLimits
    results: Sequence[KernelResult]

    def lines(self) -> list[str]:
        """Return the table as text."""
        limits = self.limits
        head = f"{'op':26} {'rows':>5} {'microsec.':>11} {'GFLOP/s':>9} {'GB/s':>8}   share of the limit"
        return [
            (
                f"{limits.threads} threads: {limits.flops / 1e9:.1f} GFLOP/s multiply-add, "
                f"{limits.bandwidth / 1e9:.1f} GB/s read; {cpu.status()}"
            ),
            head,
            *(result.line() for result in self.results),
        ]

    def as_json(self) -> dict[str, object]:
        """Return the result in SI units."""
        return {"limits": asdict(self.limits), "results": [asdict(result) for result in self.results]}


def linear_cases(shape: ModelShape, rows: Sequence[int], weights: Sequence[str]) -> Iterator[KernelCase]:
    """Yield all linear layers of a decoder layer, and the output head."""
    layers = {
        "qkv": (shape.qkv, shape.hidden, 1),
        "o": (shape.hidden, shape.hidden, 1),
        "gate_up+silu": (2 * shape.intermediate, shape.hidden, 2),
        "down": (shape.hidden, shape.intermediate, 1),
        "lm_head": (shape.vocab, shape.hidden, 1),
    }
    for kind in weights:
        for name, (outputs, inputs, halves) in layers.items():
            copies = _packed_copies(kind, outputs, inputs, halves)
            for count in rows:
                if name != "lm_head" or count <= _MAX_LOGIT_ROWS:
                    yield _linear_case(f"{name} {kind}", copies, count)


def _packed_copies(kind: str, outputs: int, inputs: int, halves: int) -> list[PackedWeight]:
    scheme, dtype = WEIGHTS[kind]
    rows = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    first = ops.pack_weight(rows, scheme, halves)
    return [first, *(ops.pack_weight(rows, scheme, halves) for _ in range(_COLD_BYTES // first.nbytes))]


def _linear_case(name: str, copies: list[PackedWeight], rows: int) -> KernelCase:
    weight, turn = copies[0], cycle(copies)
    x = torch.randn(rows, weight.inputs)
    activation = "silu_and_mul" if weight.halves == 2 else None
    outputs = weight.outputs // weight.halves
    return KernelCase(
        name=name,
        rows=rows,
        run=lambda: ops.packed_linear(x, next(turn), None, activation),  # type: ignore[arg-type]
        flops=2.0 * rows * weight.outputs * weight.inputs,
        num_bytes=weight.nbytes + 4.0 * rows * (weight.inputs + outputs),
    )


WEIGHTS = {
    "float32": (FLOAT, torch.float32),
    "bfloat16": (FLOAT, torch.bfloat16),
    "bfloat16-medium": (replace(FLOAT, fast=True), torch.bfloat16),
    "float16": (FLOAT, torch.float16),
    "int8": (WeightScheme("int8", 32), torch.bfloat16),
    "int8-precise": (WeightScheme("int8", 32, fast=False), torch.bfloat16),
    "int6": (WeightScheme("int6", 16), torch.bfloat16),
    "int4": (WeightScheme("int4", 32, symmetric=False, two_level=True), torch.bfloat16),
    "int4-precise": (WeightScheme("int4", 32, symmetric=False, fast=False, two_level=True), torch.bfloat16),
    "int4-plain": (WeightScheme("int4", 32), torch.bfloat16),
}
"""Weight formats by name."""

SUITES: dict[str, Callable[[Sequence[int], Sequence[str]], Iterator[KernelCase]]] = {
    "linear": lambda rows, weights: linear_cases(ModelShape(), rows, weights),
    "attention": lambda rows, weights: attention_cases(),
}
"""Suite -> cases for given numbers of rows and weight formats, where these matter."""


def measure(
    suites: Sequence[str], rows: Sequence[int], weights: Sequence[str], *, quick: bool = False
) -> KernelsResult:
    """Measure the machine and then every case, or the first ones of each suite in a quick run.

    Raises:
        ConfigError: the kernels are not built.
    """
    if not cpu.available():
        raise ConfigError(f"no kernels to measure: {cpu.status()}")
    from quire.kernels.cpu import machine

    buffer = machine.read_buffer()
    limits = MachineLimits(
        threads=torch.get_num_threads(),
        flops=max(machine.peak_flops() for _ in range(5)),
        bandwidth=max(machine.read_bandwidth(buffer) for _ in range(5)),
    )
    del buffer
    most, min_seconds = (QUICK_CASES, 0.0) if quick else (None, MIN_SECONDS)
    cases = (case for suite in suites for case in islice(SUITES[suite](rows, weights), most))
    progress, results = Progress(None, "Benchmark", "kernels", ends=False), []
    for case in cases:
        results.append(measure_case(case, limits, min_seconds))
        progress.update()
    progress.close()
    return KernelsResult(limits, results)


def measure_case(
    case: KernelCase,
    limits: MachineLimits,
    min_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> KernelResult:
    """Return the median of as many calls as fit in `min_seconds`, at least five, after one warm-up call."""
    case.run()
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < min_seconds:
        started = clock()
        case.run()
        seconds.append(clock() - started)
    median = percentile(seconds, 50)
    arithmetic, memory = case.flops / limits.flops, case.num_bytes / limits.bandwidth
    return KernelResult(
        name=case.name,
        rows=case.rows,
        seconds=median,
        flops=case.flops / median,
        bandwidth=case.num_bytes / median,
        of_limit=max(arithmetic, memory) / median,
        bound="arithmetic" if arithmetic > memory else "memory",
    )
