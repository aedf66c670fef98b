"""A run of kernels, recorded once and played again without Python between them.

Between two kernels of a small step Python takes as long as the kernels do: it checks shapes, takes memory and packs
arguments, and every time with the same outcome. A tape keeps the outcome, as a CUDA graph does on a GPU.

Invariant: what is played is what was recorded, call by call, on the same addresses; so it has the same bits. A function
that computes more than sums and products outside the kernels of this library is not recorded at all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.cpu import library
from quire.kernels.cpu.calls import RecordedCall, recording
from quire.kernels.cpu.library import Call

_ALIGNMENT = 64


class RecordingError(Exception):
    """The function does more than a tape can hold; the message names what."""


class Arena:
    """Memory for the tensors of tapes that never play at the same time, used again as soon as no tensor lies in it.

    A tape knows addresses, so memory never goes back to the system while the arena lives.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape, not initialised."""
        num_bytes = math.prod(shape) * dtype.itemsize
        size = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        blocks = self._blocks.setdefault(size, [])
        block = next((block for block in blocks if block.is_free()), None)
        if block is None:
            block = _Block(size)
            blocks.append(block)
        return block.take()[:num_bytes].view(dtype).view(shape)


class _Block:
    """Bytes at a fixed address, and the tensor storage that uses them now."""

    def __init__(self, size: int) -> None:
        memory = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        self._bytes: NDArray[np.uint8] = memory[start : start + size]
        self._user: StorageWeakRef | None = None

    def is_free(self) -> bool:
        return self._user is None or self._user.expired()

    def take(self) -> Tensor:
        tensor = torch.from_numpy(self._bytes)
        self._user = StorageWeakRef(tensor.untyped_storage())
        return tensor


Part = list[RecordedCall] | Callable[[], bool]


class Tape:
    """Recorded calls, what they read and write, and the tensor that they leave their result in.

    Args:
        parts: what to do in turn: runs of kernel calls, and functions of torch between them.
        result: where the last of them puts what the recorded function returned.
        arena: holds the tensors in between.
    """

    def __init__(self, parts: Sequence[Part], result: Tensor, arena: Arena) -> None:
        self.result = result
        self._arena = arena
        self._parts = [_Run(part) if isinstance(part, list) else part for part in parts]

    def play(self) -> bool:
        """Do it all again; False if a kernel refused what it read, and what came after it was not done."""
        return all(part() for part in self._parts)


class _Run:
    """Kernel calls without Python between them."""

    def __init__(self, calls: list[RecordedCall]) -> None:
        self._arguments = [arguments for _, arguments in calls]  # the array holds their addresses
        self._calls = (Call * len(calls))(*(Call(*call) for call in calls))
        loaded = library.loaded()
        assert loaded is not None, "what was recorded was loaded"
        self._play = loaded.play

    def __call__(self) -> bool:
        return self._play(self._calls, len(self._calls)) == len(self._calls)


def record(function: Callable[[], Tensor], arena: Arena) -> Tape:
    """Run a function and keep what it does; `result` of the tape is what it returned.

    The function's inputs, outside the arena, must stay where they are for as long as the tape is played.

    Raises:
        RecordingError: it does anything but call kernels of the library, add, multiply, take views and allocate; it was
            not run to its end.
    """
    recorder = _Recorder(arena)
    with recording.into(recorder.add), recorder:
        result = function()
    return Tape(recorder.parts, result, arena)


_ELEMENTWISE: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.mul.Tensor: torch.mul,
}
"""What torch may compute between kernels: too little to be worth a kernel, and the same for every step."""

_COPIES = frozenset(
    {
        torch.ops.aten._to_copy.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.contiguous.default,
        torch.ops.aten.to.dtype,
    }
)
"""What copies a tensor, or in inference mode may do so though torch calls it a view."""


class _Recorder(TorchDispatchMode):
    """Puts new tensors into an arena, lets views pass, and refuses what may depend on the step."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.parts: list[Part] = []
        self._arena = arena

    def add(self, call: RecordedCall) -> None:
        if not (self.parts and isinstance(self.parts[-1], list)):
            self.parts.append([])
        run = self.parts[-1]
        assert isinstance(run, list)
        run.append(call)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.new_empty.default:
            like, shape = args
            return self._arena.empty(tuple(shape), options.get("dtype") or like.dtype)
        if func is torch.ops.aten.empty.memory_format:
            return self._arena.empty(tuple(args[0]), options.get("dtype") or torch.get_default_dtype())
        if func in _COPIES:
            return self._copy(args[0], func(*args, **options))
        if func.is_view:
            return _seen(func, args[0], func(*args, **options))
        if func in _ELEMENTWISE:
            return self._elementwise(_ELEMENTWISE[func], args, options)
        raise RecordingError(f"{func} runs between the kernels")

    def _copy(self, source: Tensor, value: Tensor) -> Tensor:
        if _share_memory(source, value):
            return value
        out = self._arena.empty(tuple(value.shape), value.dtype)

        def again() -> bool:
            out.copy_(source)
            return True

        again()
        self.parts.append(again)
        return out

    def _elementwise(
        self, function: Callable[..., Tensor], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Tensor:
        value = function(*args, **options)
        out = self._arena.empty(tuple(value.shape), value.dtype)

        def again() -> bool:
            function(*args, **options, out=out)
            return True

        again()
        self.parts.append(again)
        return out


def _seen(func: Any, source: Tensor, views: Tensor | Sequence[Tensor]) -> Any:
    """Views of a tensor, if that is what they are: in inference mode torch also takes for one what may copy."""
    for view in [views] if isinstance(views, Tensor) else views:
        if not _share_memory(source, view):
            raise RecordingError(f"{func} makes a copy between the kernels")
    return views


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
