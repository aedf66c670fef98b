# SPDX-License-Identifier: Apache-2.0
"""Device interface of the worker, and the table of devices.

Invariant: nothing else in the worker asks for the device type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.plugins import FACTORY, PluginTable
from quire.worker.transfers import Transfers

if TYPE_CHECKING:
    from torch import Tensor

    from quire.worker.input_batch import InputBatch
    from quire.worker.pipeline import Pipeline, PipelineModel


class DeviceMemory(Protocol):
    """Memory accounting of a device."""

    warm_up_tokens: int
    warm_up_seqs: int
    """Most tokens of the prefill step and most requests of the decode step that run before memory is measured."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Wrap a representative step; its peak memory is withheld from the KV cache."""

    def usable_bytes(self, config: EngineConfig) -> tuple[int, str]:
        """Return the bytes that the KV cache may take now, with the reason."""

    def unasked_bytes(self, config: EngineConfig) -> int | None:
        """Return the default size of the KV cache within `usable_bytes`; None: all of it."""

    def give_back(self) -> None:
        """Return unused memory to the system; garbage has been collected where that was needed."""

    def discard(self, tensors: Sequence[Tensor]) -> bool:
        """Return the pages of tensors, and unused memory, to the system; their addresses stay valid, their contents do
        not.

        False: the device keeps no address without its memory, and the contents may be lost.
        """


class Device(Protocol):
    """Device as this process uses it: memory, transfers and pipelines."""

    memory: DeviceMemory
    transfers: Transfers
    is_asynchronous: bool
    parks_weights: bool
    """True if unused weights should be moved to host memory."""
    compiles_kernels: bool
    """True if kernels are compiled at first launch, so that startup should launch them all."""
    logits_elements: int
    """Most elements of logits that exist at once."""

    def start(self, config: EngineConfig) -> None:
        """Prepare the device for this process.

        Raises:
            ConfigError: the device cannot be used.
        """

    def step(self) -> AbstractContextManager[None]:
        """Wrap a step; sets what the calling thread's state changes in the computation."""

    def pipeline(
        self,
        model: PipelineModel,
        batch: InputBatch,
        config: EngineConfig,
        *,
        is_rehearsal: bool = False,
        samples_here: bool = True,
    ) -> Pipeline:
        """Return the pipeline that makes a step's inputs and runs the model.

        `is_rehearsal`: the memory of steps may be measured. `samples_here` False: sampled tokens are in the host's
        rows before a step reads them.
        """


DEVICES: PluginTable[Callable[[], Device]] = PluginTable(
    "quire.devices",
    "--device",
    {
        "cpu": "quire.worker.cpu:CpuDevice",
        "cuda": "quire.worker.gpu:CudaDevice",
        "xpu": "quire.worker.gpu:XpuDevice",
    },
    FACTORY,
)


def make_device(name: str) -> Device:
    """Return the device of a prepared config's `device`, by torch's name (ROCm is cuda).

    Raises:
        ConfigError: Triton is not installed.
    """
    if name in ("cuda", "xpu") and find_spec("triton") is None:
        raise ConfigError(f"--device {name} needs Triton; install a GPU build of torch, which includes it")
    return DEVICES.resolve(name)()
