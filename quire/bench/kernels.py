"""Kernels against what the machine can do: each op at the shapes of a real model.

Invariant: the limits are measured in the same run, before the ops, with the same threads. An op's limit is the time
that its arithmetic, or the memory it must read and write, needs at those rates, whichever is longer. Arithmetic counts
as float32 multiply-adds, also that of integers, which may therefore exceed its limit.
A new op is a function in `SUITES` that yields its cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice

import torch

from quire.bench.attention import attention_cases
from quire.bench.case import Case
from quire.bench.statistics import percentile
from quire.errors import ConfigError
from quire.kernels import cpu, ops
from quire.kernels.linear import FLOAT, PackedWeight, WeightScheme

ROWS = (1, 4, 16, 64, 512)
MIN_SECONDS = 0.2
QUICK_CASES = 2
"""Cases of a suite, each called a few times, that show that everything runs."""
_COLD_BYTES = 96 * 2**20
"""Weights are taken in turn from copies of this size together, so that none is still in a cache."""
_MAX_LOGIT_ROWS = 64


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; the default is a Qwen 2 of half a billion parameters."""

    hidden: int = 896
    qkv: int = 1152
    intermediate: int = 4864
    vocab: int = 151936


@dataclass(frozen=True)
class Limits:
    """Rates of the machine, per second."""

    threads: int
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class KernelResult:
    """What one case reached: median seconds, rates per second, and the share of the limit."""

    name: str
    rows: int
    seconds: float
    flops: float
    bandwidth: float
    of_limit: float
    bound: str

    def line(self) -> str:
        """The result for people."""
        return (
            f"{self.name:26} {self.rows:5} {self.seconds * 1e6:11.1f} {self.flops / 1e9:9.1f} "
            f"{self.bandwidth / 1e9:8.1f}   {self.of_limit:4.0%} of {self.bound}"
        )


@dataclass(frozen=True)
class KernelsResult:
    """The limits and every case."""

    limits: Limits
    results: Sequence[KernelResult]

    def lines(self) -> list[str]:
        """The table for people."""
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
        """The result for programs, in SI units."""
        return {"limits": asdict(self.limits), "results": [asdict(result) for result in self.results]}


def linear_cases(shape: ModelShape, rows: Sequence[int], weights: Sequence[str]) -> Iterator[Case]:
    """All matrices of a layer, and the output head."""
    matrices = {
        "qkv": (shape.qkv, shape.hidden, 1),
        "o": (shape.hidden, shape.hidden, 1),
        "gate_up+silu": (2 * shape.intermediate, shape.hidden, 2),
        "down": (shape.hidden, shape.intermediate, 1),
        "lm_head": (shape.vocab, shape.hidden, 1),
    }
    for kind in weights:
        for name, (outputs, inputs, halves) in matrices.items():
            copies = _packed_copies(kind, outputs, inputs, halves)
            for count in rows:
                if name != "lm_head" or count <= _MAX_LOGIT_ROWS:
                    yield _linear_case(f"{name} {kind}", copies, count)


def _packed_copies(kind: str, outputs: int, inputs: int, halves: int) -> list[PackedWeight]:
    scheme, dtype = WEIGHTS[kind]
    rows = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    first = ops.pack_weight(rows, scheme, halves)
    return [first, *(ops.pack_weight(rows, scheme, halves) for _ in range(_COLD_BYTES // first.nbytes))]


def _linear_case(name: str, copies: list[PackedWeight], rows: int) -> Case:
    weight, turn = copies[0], cycle(copies)
    x = torch.randn(rows, weight.inputs)
    activation = "silu_and_mul" if weight.halves == 2 else None
    outputs = weight.outputs // weight.halves
    return Case(
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
    "int4": (WeightScheme("int4", 32, symmetric=False, two_level=True), torch.bfloat16),
    "int4-precise": (WeightScheme("int4", 32, symmetric=False, fast=False, two_level=True), torch.bfloat16),
    "int4-plain": (WeightScheme("int4", 32), torch.bfloat16),
}
"""Weight formats by name."""

SUITES: dict[str, Callable[[Sequence[int], Sequence[str]], Iterator[Case]]] = {
    "linear": lambda rows, weights: linear_cases(ModelShape(), rows, weights),
    "attention": lambda rows, weights: attention_cases(),
}
"""What can be measured: the cases for some numbers of rows and some weight formats, where these matter."""


def measure(
    suites: Sequence[str], rows: Sequence[int], weights: Sequence[str], *, quick: bool = False
) -> KernelsResult:
    """Measure the machine and then every case, or quickly the first ones of each suite.

    Raises:
        ConfigError: the kernels were not built.
    """
    if not cpu.available():
        raise ConfigError(f"there is nothing to measure: {cpu.status()}")
    from quire.kernels.cpu import machine

    buffer = machine.read_buffer()
    limits = Limits(
        threads=torch.get_num_threads(),
        flops=max(machine.peak_flops() for _ in range(5)),
        bandwidth=max(machine.read_bandwidth(buffer) for _ in range(5)),
    )
    del buffer
    most, min_seconds = (QUICK_CASES, 0.0) if quick else (None, MIN_SECONDS)
    cases = (case for suite in suites for case in islice(SUITES[suite](rows, weights), most))
    return KernelsResult(limits, [measure_case(case, limits, min_seconds) for case in cases])


def measure_case(
    case: Case, limits: Limits, min_seconds: float, clock: Callable[[], float] = time.perf_counter
) -> KernelResult:
    """The median of as many calls as fit in `min_seconds`, at least five, after one that is not counted."""
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
