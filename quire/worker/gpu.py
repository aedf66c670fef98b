"""GPUs through torch: NVIDIA's and, under the same name, AMD's as `cuda`; Intel's as `xpu`.

Invariant: all work goes to one stream in order, and nothing here waits for it but `Mark.wait` and what happens before
the first step. Memory of the host that a copy in flight reads or writes is pinned, and torch's allocator of pinned
memory does not give it to others before the copy is done.
"""

from __future__ import annotations

import gc
import logging
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError, StartupError
from quire.kernels.triton import compiles
from quire.kernels.triton.copies import copy_blocks
from quire.layers.kv_cache import why_not_captured
from quire.processes import collect_garbage
from quire.worker.block_copies import Moves
from quire.worker.device_pipeline import DevicePipeline
from quire.worker.devices import Mark
from quire.worker.graphs import Capturer
from quire.worker.input_batch import InputBatch
from quire.worker.pipeline import Body, Pipeline

logger = logging.getLogger(__name__)

MIB = 2**20
ALL = 1 << 40
LOGITS_ELEMENTS = 1 << 26
"""256 MiB of float32: 512 rows of a vocabulary of 128k."""


class GpuMark:
    """An event of the stream."""

    def __init__(self, event: Any) -> None:
        self._event = event
        event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, GpuMark), "marks of one device"
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class GpuMemory:
    """Memory of one device, which torch's device module counts."""

    warm_up_tokens = ALL
    warm_up_seqs = ALL

    def __init__(self, module: Any) -> None:
        self._module = module
        self._rehearsed_bytes = 0

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self._module.empty_cache()
        self._module.reset_peak_memory_stats()
        before, beside = self._module.memory_reserved(), self._bytes_beside()
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise StartupError(f"not enough memory on the device for the largest step: {error}") from error
        self._module.synchronize()
        self._rehearsed_bytes += self._module.max_memory_reserved() - before
        self._rehearsed_bytes += max(self._bytes_beside() - beside, 0)

    def _bytes_beside(self) -> int:
        """In use, but not by torch's allocator: graphs, the code of kernels, and what others have."""
        free, total = self._module.mem_get_info()
        in_use: int = total - free
        return in_use - int(self._module.memory_reserved())

    def usable_bytes(self, config: EngineConfig) -> tuple[int, str]:
        share = config.cache.memory_share
        gc.collect()  # a rehearsed runner and its graphs refer to each other
        self._module.empty_cache()
        free, total = self._module.mem_get_info()
        used, rehearsed = total - free, self._rehearsed_bytes
        reason = (
            f"{share:.0%} of the device's {total / MIB:.0f} MiB, less {used / MIB:.0f} MiB in use after loading and "
            f"{rehearsed / MIB:.0f} MiB that the largest steps take"
        )
        return max(int(share * total) - used - rehearsed, 0), reason

    def unasked_bytes(self, config: EngineConfig) -> int | None:
        """A GPU has nobody else to serve."""
        return None

    def give_back(self) -> None:
        collect_garbage()
        self._module.empty_cache()


class GpuTransfers:
    """Through pinned memory, on the one stream of all work."""

    def __init__(self, torch_device: torch.device, module: Any) -> None:
        self.torch_device = torch_device
        self._module = module

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        return GpuMark(self._module.Event(enable_timing=True))

    def host_memory(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def copy_blocks(self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Moves) -> None:
        """By a kernel that reads and writes pinned memory of the host as its own, so that nobody waits."""
        copy_by_kernel(sources, targets, self.upload(torch.tensor(moves)))


class GpuDevice:
    """One GPU, which torch's device module of that type drives."""

    is_asynchronous = True
    parks_weights = True
    compiles_kernels = True
    logits_elements = LOGITS_ELEMENTS

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self._torch_device = torch.device(device_type, 0)
        self._module: Any = torch.get_device_module(device_type)
        self.memory = GpuMemory(self._module)
        self.transfers = GpuTransfers(self._torch_device, self._module)

    def start(self, config: EngineConfig) -> None:
        if not self._module.is_available():
            raise ConfigError(
                f"--device {self._type}: torch finds no such device; --device cpu is always there"
            )
        self._module.set_device(self._torch_device)
        compiles.watch(None)
        check_compiler(self._torch_device)
        asked = config.kernels.matmul_precision
        torch.set_float32_matmul_precision("highest" if asked == "auto" else asked)
        free, total = self._module.mem_get_info()
        name = self._module.get_device_name()
        logger.info("%s: %s, %.0f of %.0f MiB free", self._type, name, free / MIB, total / MIB)

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pipeline(
        self,
        model: Body,
        batch: InputBatch,
        config: EngineConfig,
        *,
        is_rehearsal: bool = False,
        samples_here: bool = True,
    ) -> Pipeline:
        return DevicePipeline(
            model,
            batch,
            config,
            self.transfers,
            self._capturer(model),
            is_rehearsal=is_rehearsal,
            samples_here=samples_here,
        )

    def _capturer(self, model: Body) -> Capturer | None:
        """What records graphs, where that can be done."""
        return None


def check_compiler(torch_device: torch.device) -> None:
    """Compile the smallest of kernels, and launch it.

    Raises:
        StartupError: that cannot be done on this machine.
    """
    blocks = torch.zeros(2, 8, dtype=torch.uint8, device=torch_device)
    try:
        copy_by_kernel([blocks], [blocks], torch.tensor([[0, 1]], device=torch_device))
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise StartupError(
            "Triton cannot compile kernels on this machine. It needs a C compiler (gcc, clang, or the one that the "
            f"environment's CC names) and Python's headers (as a rule the package python3-dev): {error}"
        ) from error


def copy_by_kernel(sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Tensor) -> None:
    """Copy blocks of tensors [blocks, bytes]; moves [N, 2] int64."""
    for source, target in zip(sources, targets, strict=True):
        copy_blocks(_words(target), _words(source), moves)


def _words(blocks: Tensor) -> Tensor:
    """Bytes [blocks, n] as the largest numbers that they are a multiple of."""
    fitting = (dtype for dtype in (torch.int64, torch.int32) if blocks.shape[1] % dtype.itemsize == 0)
    return blocks.view(next(fitting, torch.uint8))


class XpuDevice(GpuDevice):
    """An Intel GPU."""

    def __init__(self) -> None:
        super().__init__("xpu")


class CudaDevice(GpuDevice):
    """An NVIDIA or AMD GPU, whose launches can be captured."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Only what this thread does would disturb the capture; others may go on.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def _capturer(self, model: Body) -> Capturer | None:
        reason = why_not_captured(model)
        if reason is not None:
            logger.info("no CUDA graphs: %s", reason)
        return None if reason is not None else self
