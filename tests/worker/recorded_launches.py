# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.worker.recorded_launches MODELS ADAPTER`: which kernels does a GPU compile after start?

Engines serve requests of all kinds on a device made of the host, and every kernel of Triton's is asked which variant it
would compile, and not run; what it would have written is 0. Prints the variants that no one asked for before the first
request, one a line, and how many were asked for in time. It wants a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from quire.adapters import LoRARequest
from quire.config import QuantizationConfig
from quire.executor import uniproc
from quire.kernels import cpu, triton
from quire.kernels.triton import launch
from quire.layers import attention
from quire.sampling_params import SamplingParams
from tests.end_to_end.test_overlapped import Job, jobs_of_all_kinds, overlapped, serve
from tests.worker.fake_gpu import FakeGpu

NUM_PROCESSORS = 132
LIMITS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 16,
}


class Driver:
    """Stands in for a GPU's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0


class Variants:
    """Record of compiled variants: those of the start, and late ones, first compiled while serving or in a graph."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.late: set[str] = set()
        self.is_serving = False
        self.is_recording = False

    def ask(self, *, key: str, fn: Any, **_facts: Any) -> bool:
        """A hook of Triton's; True says that nothing is to be compiled."""
        variant = f"{fn.name}: {key}"
        if not self.is_serving and not self.is_recording:
            self.known.add(variant)
        elif variant not in self.known:
            self.late.add(f"{'while serving' if self.is_serving else 'in a graph'}: {variant}")
        return True


class StartedGpu(FakeGpu):
    """Says when its engine has started."""

    variants: Variants

    def pipeline(self, *args: Any, **options: Any) -> Any:
        made = super().pipeline(*args, **options)
        prepare = made.prepare

        def prepare_and_serve() -> None:
            prepare()
            self.variants.is_serving = True

        if not options.get("is_rehearsal"):
            made.prepare = prepare_and_serve
        return made

    def capture(self, *args: Any) -> Any:
        self.variants.is_recording = True
        try:
            return super().capture(*args)
        finally:
            self.variants.is_recording = False


def variants_of(model: str, adapter: LoRARequest, jobs: list[Job], **args: Any) -> Variants:
    """Return the variants of one engine; if it serves adapters, every other request has one."""
    gpu = StartedGpu()
    gpu.variants = variants = Variants()
    knobs.runtime.jit_cache_hook = variants.ask
    uniproc.make_device = lambda _name: gpu
    if "enable_lora" in args:
        jobs[::2] = [job._replace(adapter=adapter) for job in jobs[::2]]
    serve(jobs, model=model, **LIMITS | overlapped(2) | args)
    return variants


def zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an allocator so that memory kernels do not write is the same each time."""
    return lambda *args, **options: make(*args, **options).zero_()


def many_logprobs() -> list[Job]:
    """Return simultaneous requests with the largest allowed number of logprobs."""
    wanted = ({"logprobs": 20}, {"logprobs": 20, "prompt_logprobs": 20}, {"logprobs": 7, "top_p": 0.9})
    return [
        Job([3 + i] * (1 + 3 * i), SamplingParams(max_tokens=6, seed=i, **wanted[i % 3])) for i in range(9)
    ]


def plain_jobs() -> list[Job]:
    """A few of each kind that graphs choose for."""
    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {}, {"top_k": 5}, {"presence_penalty": 0.5})
    return [
        Job([3 + i] * (1 + 9 * i), SamplingParams(max_tokens=5, seed=i, **kinds[i % 4])) for i in range(10)
    ]


ADAPTS: dict[str, Any] = {"enable_lora": True}
WIDE: dict[str, Any] = {"max_num_seqs": 60, "max_num_batched_tokens": 320, "num_gpu_blocks_override": 200}
"""So that there are graphs of sizes before which no pass is run."""
GUESSES: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
ENGINES: tuple[tuple[str, dict[str, Any], Callable[[], list[Job]]], ...] = (
    ("llama", {}, jobs_of_all_kinds),
    ("llama", WIDE, plain_jobs),
    ("llama", GUESSES, plain_jobs),
    ("llama", {"quantization": "int8"}, jobs_of_all_kinds),
    ("llama", {"quantization": "int4"}, plain_jobs),
    ("llama", {"quantization": "fp8", "quantization_config": {"gemm": "triton"}}, plain_jobs),
    ("llama", {"kv_cache_dtype": "fp8"}, plain_jobs),
    ("llama", {"batch_invariant": True}, plain_jobs),
    ("llama", {}, many_logprobs),
    ("llama", {"logprobs_mode": "processed_logprobs"}, many_logprobs),
    ("llama", ADAPTS, jobs_of_all_kinds),
    ("llama", ADAPTS | {"enforce_eager": True}, jobs_of_all_kinds),
    ("mixtral", WIDE, plain_jobs),
    ("mixtral", {"quantization": "int8"}, plain_jobs),
    ("deepseekv3", {}, plain_jobs),
    ("deepseekv3", WIDE, plain_jobs),
    ("bamba", WIDE, plain_jobs),
    ("qwen3next", {}, plain_jobs),
)
"""Model, its engine's arguments, and what is asked of it."""


def main(models: str, adapter: str, *only: str) -> None:
    driver.set_active(Driver())
    triton.DEVICE_TYPES = ("cpu", "cuda")
    cpu.supports = lambda _dtype: False
    launch.num_processors = lambda _device: NUM_PROCESSORS
    torch.empty, torch.empty_like = zeroed(torch.empty), zeroed(torch.empty_like)
    QuantizationConfig.check = lambda *_args, **_options: None
    attention.device_type = lambda _config: "cuda"
    count = 0
    for number, (name, args, jobs) in enumerate(ENGINES):
        if only and str(number) not in only:
            continue
        lora = LoRARequest("adapter", 1, adapter)
        variants = variants_of(str(Path(models) / name), lora, jobs(), **args)
        count += len(variants.known)
        for variant in sorted(variants.late):
            print(f"late: {name} {args} {variant}")
    print(f"asked for before the first request: {count}")


if __name__ == "__main__":
    main(*sys.argv[1:])
