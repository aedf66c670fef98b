# SPDX-License-Identifier: Apache-2.0
"""An asynchronous device made of the host.

It runs everything at once, but shows results as late as a GPU may: what is downloaded holds poison until a later mark
is waited for. A graph keeps what it was made from and does that again when it is replayed; graphs share their memory,
so a replay spoils what the others have left. What a graph reads must stand where it stood when it was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels.dispatch_mode import DispatchMode
from quire.worker.block_copies import Moves
from quire.worker.cpu import HostMark
from quire.worker.gpu import DevicePipeline, copy_by_kernel
from quire.worker.input_batch import InputBatch
from quire.worker.pipeline import Pipeline, PipelineModel

POISON = -7_777_777


class FakeMark(HostMark):
    """Delivers what was downloaded before it when it is waited for."""

    def __init__(self, deliveries: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._deliveries = deliveries

    @torch.inference_mode()
    def wait(self) -> None:
        for host, content in self._deliveries:
            host.copy_(content)


class Addresses(DispatchMode):
    """While active: where the tensors stand that torch's operations are given, and did not make meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {*addresses((args, kwargs or {}))}
        if func is torch.ops.aten.lift_fresh.default:  # a number of Python's
            self._made |= given
        self.read |= given - self._made
        result = func(*args, **kwargs or {})
        self._made |= {*addresses(result)} - self.read
        return result


def addresses(value: Any) -> Iterator[int]:
    """Yield the start addresses of the memory of tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value.untyped_storage().data_ptr()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from addresses(item)
    elif isinstance(value, dict):
        yield from addresses([*value.values()])


def recorded(run: Callable[[], Tensor]) -> tuple[Tensor, set[int]]:
    """Return the result of `run`, and the addresses that it reads."""
    with Addresses() as seen:
        result = run()
    return result, seen.read


class FakeGpu:
    """A `Device`, its memory and transfers, and a `Capturer`, that counts what happens."""

    torch_device = torch.device("cpu")
    is_asynchronous = True
    parks_weights = True
    compiles_kernels = True
    warm_up_tokens = 1 << 40
    warm_up_seqs = 1 << 40
    logits_elements = 1 << 23

    def __init__(self, free_bytes: int = 1 << 24) -> None:
        self.memory = self.transfers = self
        self._free_bytes = free_bytes
        self._downloads: list[tuple[Tensor, Tensor]] = []
        self.num_uploads = 0
        self.num_rehearsals = 0
        self.captured: list[int] = []
        """Rows of hidden states of each graph of a forward pass."""
        self.replayed: list[int] = []
        self.captured_choices: list[int] = []
        """Tokens of each graph that chooses some."""
        self.replayed_choices: list[int] = []
        self.pools: list[object] = []
        self._outputs: dict[int, list[Tensor]] = {}

    def start(self, config: EngineConfig) -> None:
        self.started = True

    def rehearsal(self) -> AbstractContextManager[None]:
        self.num_rehearsals += 1
        return nullcontext()

    def usable_bytes(self, config: EngineConfig) -> tuple[int, str]:
        return int(config.cache.memory_share * self._free_bytes), "what a fake device has"

    def unasked_bytes(self, config: EngineConfig) -> int | None:
        return None

    def give_back(self) -> None:
        """The host's."""

    def discard(self, tensors: Sequence[Tensor]) -> bool:
        return False

    def host_memory(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    def copy_blocks(self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Moves) -> None:
        copy_by_kernel(sources, targets, self.upload(torch.tensor(moves)))

    def upload(self, tensor: Tensor) -> Tensor:
        self.num_uploads += 1
        return tensor.clone()

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.full_like(tensor, POISON if tensor.dtype.itemsize > 1 else 1)
        self._downloads.append((host, tensor.clone()))
        return host

    def has_downloaded(self, tensor: Tensor) -> bool:
        """Whether it is what was downloaded, or a part of that, and has come."""
        own = tensor.untyped_storage().data_ptr()
        return any(
            host.untyped_storage().data_ptr() == own and host.equal(content)
            for host, content in self._downloads
        )

    def mark(self) -> FakeMark:
        return FakeMark([*self._downloads])

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pipeline(
        self,
        model: PipelineModel,
        batch: InputBatch,
        config: EngineConfig,
        *,
        is_rehearsal: bool = False,
        samples_here: bool = True,
    ) -> Pipeline:
        return DevicePipeline(
            model, batch, config, self, self, is_rehearsal=is_rehearsal, samples_here=samples_here
        )

    def graph_pool(self) -> Any:
        self.pools.append(pool := object())
        return pool

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
        output, known = recorded(run)
        spoil(output)
        size, sharing = len(output), self._outputs.setdefault(id(pool), [])
        sharing.append(output)
        chooses = output.dim() == 1
        (self.captured_choices if chooses else self.captured).append(size)

        def replay() -> None:
            result, read = recorded(run)
            assert read <= known, "a graph reads from where it was captured"
            result = result.clone()
            for other in sharing:
                spoil(other)
            output.copy_(result)
            (self.replayed_choices if chooses else self.replayed).append(size)

        return replay, output

    def reserved_bytes(self) -> int:
        return 0


def spoil(rows: Tensor) -> None:
    rows.fill_(torch.nan if rows.is_floating_point() else POISON)
