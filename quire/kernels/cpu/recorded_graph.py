# SPDX-License-Identifier: Apache-2.0
"""Recorded kernel graph on a CPU: kernel calls recorded once and replayed without Python between them.

Between two kernels of a small step Python takes as long as the kernels do: it checks shapes, allocates memory and packs
arguments, every time with the same outcome. A recording keeps the outcome, as a CUDA graph does on a GPU.

Invariant: a replay makes the recorded calls on the same addresses, so it has the same bits. torch computations between
the kernels are recorded too, if they only create new tensors from tensors. A function that reads a tensor's value,
changes a tensor in place, or uses random numbers, cannot be recorded.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quire.kernels.cpu import library, traffic
from quire.kernels.cpu.arena import Arena
from quire.kernels.cpu.calls import RecordedCall, recording
from quire.kernels.cpu.library import NativeCall
from quire.kernels.dispatch_mode import DispatchMode


class RecordingError(Exception):
    """Raised if a function does something that cannot be recorded; the message names it."""


Computation = Callable[[], bool]
"""Computation between kernels; returns whether it succeeded."""
Part = list[RecordedCall] | Computation


class RecordedGraph:
    """Recorded kernel graph: calls, their tensors, and the output tensor.

    Args:
        parts: in order, runs of kernel calls, and torch computations between them.
        result: output of the recorded function.
        arena: holds the intermediate tensors.
    """

    def __init__(self, parts: Sequence[Part], result: Tensor, arena: Arena) -> None:
        self.result = result
        self._arena = arena
        self._parts = [KernelRun(part) if isinstance(part, list) else part for part in parts]

    def replay(self) -> bool:
        """Replay; False if a kernel refused its input, and later parts were not run."""
        return all(part() for part in self._parts)


class TimedCall(NamedTuple):
    """Kernel call during a replay, and the bytes of weights, or keys and values, that it had to read."""

    label: str
    nanoseconds: int
    num_bytes: int


class _Timing(threading.local):
    """Listener for the times of calls in graphs that this thread replays."""

    listener: Callable[[TimedCall], None] | None = None

    @contextmanager
    def into(self, listener: Callable[[TimedCall], None]) -> Iterator[None]:
        """Notify `listener` of each call in this context."""
        assert self.listener is None, "one at a time"
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None


timing = _Timing()


class KernelRun:
    """Kernel calls without Python between them."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self.numbers = np.frombuffer(bytearray().join(packed for _, packed in calls), dtype=np.int64)
        """Packed arguments of all calls, concatenated, as int64; floats by their bits."""
        sizes = [len(packed) for _, packed in calls]
        starts = [self.numbers.ctypes.data + place for place in accumulate(sizes, initial=0)]
        self._functions, self._sizes = [address for address, _ in calls], sizes
        self._calls = (NativeCall * len(calls))(*map(NativeCall, self._functions, starts))
        loaded = library.loaded()
        assert loaded is not None, "calls were recorded with the library loaded"
        self._library = loaded
        self._play = loaded.play

    def __call__(self) -> bool:
        if timing.listener is not None:
            return self._timed(timing.listener)
        return self._play(self._calls, len(self._calls)) == len(self._calls)

    def _timed(self, listener: Callable[[TimedCall], None]) -> bool:
        kernels = {kernel.address: name for name, kernel in self._library.kernels.items()}
        names = [kernels[address] for address in self._functions]
        # Read a call's traffic before another call's output may overwrite its count tensor.
        stops = {end for end, name in enumerate(names, 1) if name in traffic.DATA_DEPENDENT_OPS}
        parts = pairwise(sorted({0, *stops, len(names)}))
        return all(self._timed_part(first, end, names, listener) for first, end in parts)

    def _timed_part(
        self, first: int, end: int, names: Sequence[str], listener: Callable[[TimedCall], None]
    ) -> bool:
        took = (ctypes.c_int64 * (end - first))()
        calls = (NativeCall * (end - first)).from_buffer(self._calls, first * ctypes.sizeof(NativeCall))
        played = self._library.play_timed(calls, len(calls), took)
        packed, start = self.numbers.view(np.uint8).data, sum(self._sizes[:first])
        for name, size, nanoseconds in zip(
            names[first : first + played], self._sizes[first:end], took, strict=False
        ):
            arguments = bytes(packed[start : start + size])
            start += size
            listener(
                TimedCall(traffic.label(name, arguments), nanoseconds, traffic.num_bytes(name, arguments))
            )
        return played == len(calls)


def record(function: Callable[[], Tensor], arena: Arena) -> RecordedGraph:
    """Run a function and record it; `result` of the recording is its return value.

    The function's inputs outside the arena must keep their addresses for as long as the recording is replayed.

    Raises:
        RecordingError: it does more than call kernels of the library, create new tensors with torch, take views and
            allocate; it was not run to its end.
        ArenaFullError: it needs more memory than the arena has; as above.
    """
    recorder = GraphRecorder(arena)
    arena.begin()
    with recording.into(recorder.add), recorder:
        result = function()
    return RecordedGraph(recorder.parts, result, arena)


_IN_PLACE: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.sub.Tensor: torch.sub,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.neg.default: torch.neg,
    torch.ops.aten.cat.default: torch.cat,
    torch.ops.aten.clamp.default: torch.clamp,
    torch.ops.aten.index_select.default: torch.index_select,
    torch.ops.aten.expm1.default: torch.expm1,
}
"""Frequent operations between kernels -> function with an `out` argument."""

_TIED_TO_THE_STEP = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
"""Tags of operations whose result depends on more than the elements of tensors."""

_COPIES = frozenset(
    {
        torch.ops.aten._to_copy.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.contiguous.default,
        torch.ops.aten.to.dtype,
    }
)
"""Operations that copy a tensor, or may copy in inference mode although torch declares a view."""


_ALLOCATIONS = frozenset({torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format})


def may_be_recorded(func: Any, args: Sequence[Any]) -> bool:
    """Return whether this torch operation, with these arguments, can be recorded between kernels."""
    known = func in _ALLOCATIONS or func in _COPIES or bool(func.is_view)
    return known or _does_nothing(func, args) or _makes_tensors_of_tensors(func)


def _does_nothing(func: Any, args: Sequence[Any]) -> bool:
    return func is torch.ops.aten.dropout.default and not args[2]


@cache
def _makes_tensors_of_tensors(func: Any) -> bool:
    if func._schema.is_mutable or not _TIED_TO_THE_STEP.isdisjoint(func.tags):
        return False
    return all(isinstance(made.real_type, torch.TensorType) for made in func._schema.returns)


class GraphRecorder(DispatchMode):
    """Mode that allocates new tensors in an arena, allows views, and refuses what may depend on the step."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.parts: list[Any] = []
        """Runs of kernel calls, each a list, and the computations of `_keep` between them."""
        self._arena = arena

    def add(self, call: RecordedCall) -> None:
        """Record a kernel call."""
        if not (self.parts and isinstance(self.parts[-1], list)):
            self.parts.append([])
        self.parts[-1].append(call)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.new_empty.default:
            like, shape = args
            return self._empty(tuple(shape), options.get("dtype") or like.dtype)
        if func is torch.ops.aten.empty.memory_format:
            return self._empty(tuple(args[0]), options.get("dtype") or torch.get_default_dtype())
        if func in _COPIES:
            return self._copy(args[0], func(*args, **options))
        if func.is_view:
            return self._seen(func, args, options)
        if _does_nothing(func, args):
            return args[0]
        if _makes_tensors_of_tensors(func):
            return self._computed(func, args, options)
        raise RecordingError(f"{func} runs between the kernels and cannot be recorded")

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._arena.empty(shape, dtype)

    def _copy(self, source: Tensor, value: Tensor) -> Tensor:
        return value if _share_memory(source, value) else self._copied(source, value)

    def _copied(self, source: Tensor, value: Tensor) -> Tensor:
        out = self._empty(tuple(value.shape), value.dtype)
        self._keep(copying, out, source)
        return out

    def _keep(self, make: Callable[..., Computation], *operands: Any) -> None:
        """Run the computation made from these operands, now and on every replay."""
        again = make(*tree_map(self._arena.unreserved, operands))
        again()
        self.parts.append(again)

    def _seen(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return views of a tensor, after checking that they are: in inference mode an operation declared a view may
        copy.
        """
        views = func(*args, **options)
        parts = [views] if isinstance(views, Tensor) else views
        if all(_share_memory(args[0], part) for part in parts):
            return views
        if isinstance(views, Tensor):
            return self._computed(func, args, options)
        raise RecordingError(f"{func} makes copies between the kernels")

    def _computed(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run an operation; return its one new tensor, or several."""
        value = func(*args, **options)
        values = [value] if isinstance(value, Tensor) else list(value)
        outs = [self._empty(tuple(part.shape), part.dtype) for part in values]
        self._keep(partial(computing, func), outs, args, options)
        return outs[0] if isinstance(value, Tensor) else tuple(outs)


def copying(target: Tensor, source: Tensor) -> Computation:
    """Return a computation that copies a tensor."""

    def again() -> bool:
        target.copy_(source)
        return True

    return again


def computing(
    func: Any, targets: Sequence[Tensor], args: Sequence[Any], options: dict[str, Any]
) -> Computation:
    """Return a computation that calls a torch function into existing tensors."""
    in_place = _IN_PLACE.get(func)

    def again() -> bool:
        if in_place is not None:
            in_place(*args, **options, out=targets[0])
            return True
        made = func(*args, **options)
        for target, part in zip(targets, [made] if isinstance(made, Tensor) else made, strict=True):
            target.copy_(part)
        return True

    return again


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
