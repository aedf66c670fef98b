# SPDX-License-Identifier: Apache-2.0
"""Profile of one decode step: time of each kernel of a recorded step, next to a memory bandwidth probe.

Invariant: steps and probes alternate within one process and second, so that a fraction of the bandwidth is a ratio of
neighbors: what a machine can read varies with its other load.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.bench.backends import QuireBackend
from quire.bench.workload import percentile, random_prompts
from quire.config import EngineConfig
from quire.config.arch import ModelArch
from quire.kernels.cpu import machine
from quire.kernels.cpu.recorded_graph import TimedCall, timing

ROWS = (1, 16)
PROMPT_LEN = 16
NUM_STEPS, NUM_ROUNDS = 24, 5

NUM_LAYERS = 24
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""config.json of Qwen 2 0.5B; its weights are random."""

ENGINE: Mapping[str, Mapping[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "bfloat16-medium": {"matmul_precision": "medium"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
    "int8-precise": {"quantization": "int8", "quantization_config": {"mode": "precise"}},
    "int4": {"quantization": "int4"},
    "int4-precise": {"quantization": "int4", "quantization_config": {"mode": "precise"}},
}
"""Weight formats of `quire bench kernels` as engine arguments."""


_WEIGHTED = ("packed_linear", "rounded_linear", "experts", "per_head_linear")  # ops that read weights
_STATEFUL = ("gated_delta", "rwkv7", "selective_scan", "ssd_scan")  # ops that read and write states


@dataclass(frozen=True)
class OpTime:
    """Op in one step: calls, seconds, and minimal bytes moved."""

    name: str
    calls: float
    seconds: float
    num_bytes: float

    def line(self, step_s: float) -> str:
        rate = f"{self.num_bytes / self.seconds / 1e9:8.1f}" if self.num_bytes else f"{'':8}"
        return (
            f"{self.name:26} {self.calls:5.0f} {self.seconds * 1e6:11.1f} {rate} {self.seconds / step_s:9.1%}"
        )


@dataclass(frozen=True)
class StepProfile:
    """Step with `rows` requests: its ops, its total time, and the probes."""

    weights: str
    rows: int
    ops: Sequence[OpTime]
    step_s: float
    weight_bytes: int
    state_bytes: int
    bandwidth: float

    @property
    def of_probe(self) -> float:
        """Weights read and states moved in a step, as a fraction of what the probe reads in that time."""
        return (self.weight_bytes + self.state_bytes) / self.step_s / self.bandwidth

    def lines(self) -> list[str]:
        """Return the table as text."""
        states = f" and moves {self.state_bytes / 1e6:.0f} MB of states" if self.state_bytes else ""
        return [
            (
                f"{self.weights}, {self.rows} requests: a step takes {self.step_s * 1e3:.2f} ms and reads "
                f"{self.weight_bytes / 1e6:.0f} MB of weights{states}: {self.of_probe:.0%} of the "
                f"{self.bandwidth / 1e9:.1f} GB/s that a probe beside it reads"
            ),
            f"{'op':26} {'calls':>5} {'microsec.':>11} {'GB/s':>8}   of the step",
            *(op.line(self.step_s) for op in self.ops),
        ]

    def as_json(self) -> dict[str, object]:
        """Return the result in SI units."""
        return asdict(self) | {"of_probe": self.of_probe}


@dataclass(frozen=True)
class StepProfiles:
    """Profiles of every weight format and number of requests."""

    results: Sequence[StepProfile]

    def lines(self) -> list[str]:
        """Return the tables as text."""
        return [line for result in self.results for line in result.lines()]

    def as_json(self) -> dict[str, object]:
        """Return the results in SI units."""
        return {"steps": [result.as_json() for result in self.results]}


def measure(
    weights: Sequence[str],
    rows: Sequence[int],
    *,
    model: Path | None = None,
    threads: int | None = None,
    quick: bool = False,
) -> StepProfiles:
    """Profile steps; recorded graphs hold the layers before the head, and all of a further multi-step round.

    Args:
        model: directory with a config.json, run with random weights; None: `SHAPE`.
    """
    with _checkpoint(1 if quick else NUM_LAYERS) if model is None else nullcontext(model) as directory:
        return StepProfiles(
            [result for name in weights for result in _of_model(directory, name, rows, threads, quick)]
        )


def _of_model(
    directory: Path, weights: str, rows: Sequence[int], threads: int | None, quick: bool
) -> list[StepProfile]:
    config = EngineConfig.from_args(
        model=str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=PROMPT_LEN + NUM_STEPS + 8,
        max_num_seqs=max(rows),
        cpu_threads=threads or 0,
        **ENGINE[weights],
    )
    backend, buffer = QuireBackend(config), machine.read_buffer(8 if quick else 256)
    rounds = 1 if quick else NUM_ROUNDS
    head_bytes = _head_bytes(backend.arch, weights)
    return [_measure(backend, weights, count, rounds, buffer, head_bytes) for count in rows]


def _measure(
    backend: QuireBackend, weights: str, rows: int, rounds: int, buffer: Tensor, head_bytes: int
) -> StepProfile:
    prompts = random_prompts(rows, PROMPT_LEN, range(1, 100), seed=0)
    backend.generate(prompts, 2)  # records the graph
    calls, of_prompts = list[TimedCall](), list[TimedCall]()
    steps, probes = [], [machine.read_bandwidth(buffer)]
    for _ in range(rounds):
        with timing.into(of_prompts.append):
            backend.generate(prompts, 1)
        with timing.into(calls.append):
            backend.generate(prompts, 1 + NUM_STEPS)
        # Timing calls costs time, so the whole step is timed separately.
        first, whole = (_seconds(partial(backend.generate, prompts, num)) for num in (1, 1 + NUM_STEPS))
        steps.append((whole - first) / NUM_STEPS)
        probes.append(max(machine.read_bandwidth(buffer) for _ in range(2)))
    step_s = percentile(steps, 50)
    ops = [*_ops(calls, of_prompts, rounds * NUM_STEPS)]
    rest = step_s - sum(op.seconds for op in ops)
    read, moved = (
        int(sum(op.num_bytes for op in ops if op.name.startswith(names))) for names in (_WEIGHTED, _STATEFUL)
    )
    ops.append(OpTime("outside of recorded graphs", 1, rest, 0))
    # Multi-step decode records the head and sampling too.
    without_head = 1 - sum(op.calls for op in ops if op.name.startswith("sample_tokens"))
    weight_bytes = read + int(without_head * head_bytes)
    return StepProfile(weights, rows, ops, step_s, weight_bytes, moved, percentile(probes, 50))


def _ops(calls: Iterable[TimedCall], of_prompts: Iterable[TimedCall], num_steps: int) -> Iterator[OpTime]:
    """Yield ops summed over all steps, minus those of prefill, longest first."""
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for sign, some in ((1, calls), (-1, of_prompts)):
        for call in some:
            for place, number in enumerate((1, call.nanoseconds, call.num_bytes)):
                sums[call.label][place] += sign * number
    ops = [
        OpTime(name, count / num_steps, nanoseconds / num_steps / 1e9, num_bytes / num_steps)
        for name, (count, nanoseconds, num_bytes) in sums.items()
        if count
    ]
    return iter(sorted(ops, key=lambda op: -op.seconds))


def _head_bytes(arch: ModelArch, weights: str) -> int:
    """Return the bytes of the head, which is int8 in integer models."""
    num_bytes = 4 if weights == "float32" else 1 if weights.startswith("int") else 2
    return arch.vocab_size * arch.hidden_size * num_bytes


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@contextmanager
def _checkpoint(num_layers: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": num_layers}))
        yield Path(directory)
