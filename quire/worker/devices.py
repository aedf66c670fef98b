"""What the worker has to know of a device, and the table of devices.

Invariant: nothing else in the worker asks which kind of device it runs on. Work is handed to a device in order; one
that is asynchronous goes on when the call has returned, and then what was downloaded may be read only after a later
mark was waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.plugins import FACTORY, PluginTable

if TYPE_CHECKING:
    from quire.worker.input_batch import InputBatch
    from quire.worker.pipeline import Body, Pipeline


class Mark(Protocol):
    """A point in the order of a device's work."""

    def wait(self) -> None:
        """Until everything before it is done."""

    def seconds_since(self, earlier: Mark) -> float:
        """The device's time between two marks that were waited for."""


class DeviceMemory(Protocol):
    """How a device's memory is counted."""

    warm_up_tokens: int
    warm_up_seqs: int
    """Tokens of the step of prompts, and requests of the step that decodes, that are run before memory is measured."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Around a step like those to come: what it takes on top will not be offered to the KV cache."""

    def usable_bytes(self, config: EngineConfig) -> tuple[int, str]:
        """What the KV cache may take of the memory now, with the reason."""

    def unasked_bytes(self, config: EngineConfig) -> int | None:
        """The part of it that the KV cache may take if nobody has said how much; None: all of it."""

    def give_back(self) -> None:
        """Hand memory that nobody holds any more to the system."""


class Transfers(Protocol):
    """How data gets from the host to a device and back, in the order of the device's work."""

    torch_device: torch.device

    def upload(self, tensor: Tensor) -> Tensor:
        """A tensor of the host, whose memory may change afterwards on an asynchronous device only."""

    def download(self, tensor: Tensor) -> Tensor:
        """A tensor of the device as one of the host, to be read when a later mark was waited for."""

    def mark(self) -> Mark:
        """A mark behind everything handed over so far."""

    def host_memory(self, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised bytes of the host, to and from which `copy_blocks` can copy."""

    def copy_blocks(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: list[tuple[int, int]]
    ) -> None:
        """See `CopyBlocks`; tensors [blocks, bytes] uint8."""


class Device(Protocol):
    """One kind of device, as this process uses it: its memory, the ways to it, and how it runs a step."""

    memory: DeviceMemory
    transfers: Transfers
    is_asynchronous: bool
    parks_weights: bool
    """Whether weights that are not used for a while are better kept in the host's memory."""
    compiles_kernels: bool
    """Whether a kernel is compiled at its first launch, so that the first launch had better be at start."""
    logits_elements: int
    """Bounds the logits that exist at once."""

    def start(self, config: EngineConfig) -> None:
        """Prepare the device for this process.

        Raises:
            ConfigError: it cannot be used.
        """

    def step(self) -> AbstractContextManager[None]:
        """Around what a step hands over: what of the calling thread changes what it computes is as it has to be."""

    def pipeline(
        self,
        model: Body,
        batch: InputBatch,
        config: EngineConfig,
        *,
        is_rehearsal: bool = False,
        samples_here: bool = True,
    ) -> Pipeline:
        """How this device makes a step's inputs and runs the model on them.

        Of a rehearsal, what its steps take may be measured on the way. Tokens that are not sampled here are in the
        host's rows before a step reads them.
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
    """The device of a prepared config's `device`, under torch's name; ROCm answers to cuda.

    Raises:
        ConfigError: what its kernels are written in is not installed.
    """
    if name in ("cuda", "xpu") and find_spec("triton") is None:
        raise ConfigError(f"--device {name} needs Triton, which comes with torch's builds for GPUs")
    return DEVICES.resolve(name)()


Parts = TypeVar("Parts", bound=tuple[Any, ...])


def moved(parts: Parts, move: Callable[[Tensor], Tensor]) -> Parts:
    """A named tuple with its tensors moved by `Transfers.upload` or `Transfers.download`."""
    return type(parts)(*(move(part) if isinstance(part, Tensor) else part for part in parts))
