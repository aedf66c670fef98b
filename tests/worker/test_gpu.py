# SPDX-License-Identifier: Apache-2.0
"""Tests of a GPU device without one: its memory accounting, and the errors of its absence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")
from triton import knobs

from quire.errors import ConfigError, StartupError
from quire.kernels.triton.launch import watch_compiles
from quire.worker import devices
from quire.worker import gpu as gpu_module
from quire.worker.cpu import CpuDevice
from quire.worker.devices import make_device
from quire.worker.gpu import CudaDevice, GpuDevice, GpuMemory, copy_by_kernel
from quire.worker.transfers import moved
from tests.worker.harness import tiny_config

MIB = 2**20


class Memory:
    """The part of torch's device module that counts: a device of 1000 MiB."""

    def __init__(self) -> None:
        self.reserved, self.peak, self.elsewhere, self.cached = 0, 0, 50, 0

    def take(self, mib: int) -> None:
        """Allocate and free again; the allocator keeps it until its cache is emptied."""
        self.cached += mib
        self.peak = max(self.peak, self.reserved + self.cached)

    def empty_cache(self) -> None:
        self.cached = 0

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.reserved + self.cached

    def memory_reserved(self) -> int:
        return (self.reserved + self.cached) * MIB

    def max_memory_reserved(self) -> int:
        return self.peak * MIB

    def mem_get_info(self) -> tuple[int, int]:
        return (1000 - self.elsewhere - self.reserved - self.cached) * MIB, 1000 * MIB

    def synchronize(self) -> None:
        """All is done."""


@pytest.fixture
def gpu() -> tuple[GpuDevice, Memory]:
    device, memory = CudaDevice(), Memory()
    device.memory = GpuMemory(memory)
    return device, memory


def test_cache_may_use_the_rest_of_the_share(gpu: tuple[GpuDevice, Memory]) -> None:
    device, memory = gpu
    memory.reserved = 200  # weights
    for step in (30, 70):
        with device.memory.rehearsal():
            memory.take(step)
    usable, reason = device.memory.usable_bytes(tiny_config(gpu_memory_utilization=0.9))
    assert usable == (900 - 50 - 200 - 100) * MIB
    assert (
        reason
        == "90% of the device's 1000 MiB, less 250 MiB in use after loading and 100 MiB for the largest steps"
    )
    assert device.memory.usable_bytes(tiny_config(gpu_memory_utilization=0.3))[0] == 0


def test_graph_memory_outside_torch_is_counted(gpu: tuple[GpuDevice, Memory]) -> None:
    device, memory = gpu
    memory.reserved = 200
    with device.memory.rehearsal():
        memory.take(30)
        memory.elsewhere += 12
    with device.memory.rehearsal():
        memory.elsewhere -= 5  # somebody else ends, which is nobody's gain
    memory.elsewhere -= 7  # the graphs are gone, and will be made again
    assert (
        device.memory.usable_bytes(tiny_config(gpu_memory_utilization=0.9))[0] == (900 - 50 - 200 - 42) * MIB
    )


def test_step_without_memory_is_reported(gpu: tuple[GpuDevice, Memory]) -> None:
    with pytest.raises(StartupError, match="largest step"), gpu[0].memory.rehearsal():
        raise torch.OutOfMemoryError("12 GiB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_absent_device_is_reported(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--device {name}: torch \S+ finds no such device"):
        make_device(name).start(tiny_config())


def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--device cuda needs Triton"):
        make_device("cuda")
    assert make_device("cpu").transfers.torch_device.type == "cpu"


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    gpu_module.check_compiler(torch.device("cpu"))
    monkeypatch.setattr(gpu_module, "copy_blocks", fail)
    with pytest.raises(
        StartupError, match=r"Install a C compiler .*python3-dev\): Failed to find C compiler"
    ):
        gpu_module.check_compiler(torch.device("cpu"))


def test_kernel_compiles_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, names = knobs.runtime, list[str]()
    monkeypatch.setattr(runtime, "jit_post_compile_hook", None)
    watch_compiles(names.append)
    runtime.jit_post_compile_hook(fn=SimpleNamespace(name="_race"), key="", is_manual_warmup=False)
    assert names == ["_race"]
    watch_compiles(None)
    assert runtime.jit_post_compile_hook is None


def test_the_table_of_devices() -> None:
    assert isinstance(make_device("cpu"), CpuDevice)
    assert [make_device(name).transfers.torch_device.type for name in ("cuda", "xpu")] == ["cuda", "xpu"]


def test_tensors_of_a_named_tuple_are_moved() -> None:
    from quire.worker.sampler.masks import StagedIds

    staged = StagedIds(torch.zeros(2), torch.ones(3))
    assert [part.sum() for part in moved(staged, lambda tensor: tensor + 1)] == [2, 6]


@pytest.mark.parametrize("num_bytes", [48, 12, 7])
def test_blocks_copied_by_the_kernel(num_bytes: int) -> None:
    device = [torch.randint(0, 256, (5, num_bytes), dtype=torch.uint8) for _ in range(2)]
    host = [torch.zeros(3, num_bytes, dtype=torch.uint8) for _ in range(2)]
    copy_by_kernel(device, host, torch.tensor([[4, 1], [2, 2]]))
    for source, target in zip(device, host, strict=True):
        assert torch.equal(target[1:], source[[4, 2]])
        assert not target[0].any()
