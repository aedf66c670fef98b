"""`python -m tests.worker.recorded_launches MODEL ADAPTER`: which kernels does a GPU compile after start?

Engines serve requests of all kinds on a device made of the host, and every kernel of Triton's is asked which variant it
would compile, and not run; what it would have written is 0. Prints the variants that no one asked for before the first
request, one a line, and how many were asked for in time. It wants a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from quire.executor import uniproc
from quire.kernels import cpu, triton
from quire.kernels.triton import launch
from quire.lora_request import LoRARequest
from tests.end_to_end.test_overlapped import jobs_of_all_kinds, overlapped, serve
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
    """What was asked for while the engine started, and what only later."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.late: set[str] = set()
        self.is_serving = False

    def ask(self, *, key: str, fn: Any, **_facts: Any) -> bool:
        """A hook of Triton's; True says that nothing is to be compiled."""
        variant = f"{fn.name}: {key}"
        if not self.is_serving:
            self.known.add(variant)
        elif variant not in self.known:
            self.late.add(variant)
        return True


class StartedGpu(FakeGpu):
    """Says when its engine has started."""

    variants: Variants

    def pipeline(self, *args: Any, is_rehearsal: bool = False) -> Any:
        made = super().pipeline(*args, is_rehearsal=is_rehearsal)
        prepare = made.prepare

        def prepare_and_serve() -> None:
            prepare()
            self.variants.is_serving = True

        made.prepare = prepare_and_serve
        return made


def variants_of(model: str, adapter: LoRARequest, **args: Any) -> Variants:
    """Of one engine; if it serves adapters, every other request has one."""
    gpu = StartedGpu()
    gpu.variants = variants = Variants()
    knobs.runtime.jit_cache_hook = variants.ask
    uniproc.make_device = lambda _name: gpu
    jobs = jobs_of_all_kinds()
    if "enable_lora" in args:
        jobs[::2] = [job._replace(adapter=adapter) for job in jobs[::2]]
    serve(jobs, model=model, **LIMITS | overlapped(2) | args)
    return variants


def zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What kernels do not write is to be the same each time."""
    return lambda *args, **options: make(*args, **options).zero_()


def main(model: str, adapter: str) -> None:
    driver.set_active(Driver())
    triton.DEVICE_TYPES = ("cpu",)
    cpu.supports = lambda _dtype: False
    launch.num_processors = lambda _device: NUM_PROCESSORS
    torch.empty, torch.empty_like = zeroed(torch.empty), zeroed(torch.empty_like)
    count = 0
    adapts: dict[str, Any] = {"enable_lora": True}
    for args in (
        {},
        {"quantization": "int8"},
        {"quantization": "int4"},
        adapts,
        adapts | {"enforce_eager": True},
    ):
        variants = variants_of(model, LoRARequest("adapter", 1, adapter), **args)
        count += len(variants.known)
        for variant in sorted(variants.late):
            print(f"late: {args} {variant}")
    print(f"asked for before the first request: {count}")


if __name__ == "__main__":
    main(*sys.argv[1:])
