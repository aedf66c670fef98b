"""A run of kernels, recorded once and played again without Python between them.

Between two kernels of a small step Python takes as long as the kernels do: it checks shapes, takes memory and packs
arguments, and every time with the same outcome. A tape keeps the outcome, as a CUDA graph does on a GPU.

Invariant: what is played is what was recorded, call by call, on the same addresses; so it has the same bits. What torch
computes between the kernels is recorded too, if it makes new tensors from tensors and nothing else: a function that
asks for a number of a tensor, changes one in place, or throws dice, is not recorded at all.
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
from quire.kernels.cpu.library import Call
from quire.kernels.dispatch_mode import DispatchMode


class RecordingError(Exception):
    """The function does more than a tape can hold; the message names what."""


Computation = Callable[[], bool]
"""Something that is done between kernels; whether it went well."""
Part = list[RecordedCall] | Computation


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
        self._parts = [Run(part) if isinstance(part, list) else part for part in parts]

    def play(self) -> bool:
        """Do it all again; False if a kernel refused what it read, and what came after it was not done."""
        return all(part() for part in self._parts)


class TimedCall(NamedTuple):
    """A kernel's call while a tape was played, and the weights, or keys and values, that it had to read."""

    label: str
    nanoseconds: int
    num_bytes: int


class _Timing(threading.local):
    """Who hears how long the calls of tapes that this thread plays take."""

    listener: Callable[[TimedCall], None] | None = None

    @contextmanager
    def into(self, listener: Callable[[TimedCall], None]) -> Iterator[None]:
        """Tell `listener` of each call."""
        assert self.listener is None, "one at a time"
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None


timing = _Timing()


class Run:
    """Kernel calls without Python between them."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self.numbers = np.frombuffer(bytearray().join(packed for _, packed in calls), dtype=np.int64)
        """What is packed for all of them, one after the other, as int64; of floats, their bits."""
        sizes = [len(packed) for _, packed in calls]
        starts = [self.numbers.ctypes.data + place for place in accumulate(sizes, initial=0)]
        self._functions, self._sizes = [address for address, _ in calls], sizes
        self._calls = (Call * len(calls))(*map(Call, self._functions, starts))
        loaded = library.loaded()
        assert loaded is not None, "what was recorded was loaded"
        self._library = loaded
        self._play = loaded.play

    def __call__(self) -> bool:
        if timing.listener is not None:
            return self._timed(timing.listener)
        return self._play(self._calls, len(self._calls)) == len(self._calls)

    def _timed(self, listener: Callable[[TimedCall], None]) -> bool:
        kernels = {kernel.address: name for name, kernel in self._library.kernels.items()}
        names = [kernels[address] for address in self._functions]
        # What a call has read is asked before another one's output lies where the number of it was.
        stops = {end for end, name in enumerate(names, 1) if name in traffic.TOLD_BY_TENSORS}
        parts = pairwise(sorted({0, *stops, len(names)}))
        return all(self._timed_part(first, end, names, listener) for first, end in parts)

    def _timed_part(
        self, first: int, end: int, names: Sequence[str], listener: Callable[[TimedCall], None]
    ) -> bool:
        took = (ctypes.c_int64 * (end - first))()
        calls = (Call * (end - first)).from_buffer(self._calls, first * ctypes.sizeof(Call))
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


def record(function: Callable[[], Tensor], arena: Arena) -> Tape:
    """Run a function and keep what it does; `result` of the tape is what it returned.

    The function's inputs, outside the arena, must stay where they are for as long as the tape is played.

    Raises:
        RecordingError: it does more than to call kernels of the library, make new tensors with torch, take views and
            allocate; it was not run to its end.
        ArenaFullError: the same, because it needs more memory than the arena has.
    """
    recorder = Recorder(arena)
    arena.begin()
    with recording.into(recorder.add), recorder:
        result = function()
    return Tape(recorder.parts, result, arena)


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
"""What often stands between kernels, as the function that writes to where a tape wants its result."""

_TIED_TO_THE_STEP = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
"""Marks of operations that another step, or another time, would have differ in more than the elements of tensors."""

_COPIES = frozenset(
    {
        torch.ops.aten._to_copy.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.contiguous.default,
        torch.ops.aten.to.dtype,
    }
)
"""What copies a tensor, or in inference mode may do so though torch calls it a view."""


_ALLOCATIONS = frozenset({torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format})


def may_be_recorded(func: Any, args: Sequence[Any]) -> bool:
    """Whether a tape can hold this operation of torch, with these arguments, between kernels."""
    known = func in _ALLOCATIONS or func in _COPIES or bool(func.is_view)
    return known or _does_nothing(func, args) or _makes_tensors_of_tensors(func)


def _does_nothing(func: Any, args: Sequence[Any]) -> bool:
    return func is torch.ops.aten.dropout.default and not args[2]


@cache
def _makes_tensors_of_tensors(func: Any) -> bool:
    if func._schema.is_mutable or not _TIED_TO_THE_STEP.isdisjoint(func.tags):
        return False
    return all(isinstance(made.real_type, torch.TensorType) for made in func._schema.returns)


class Recorder(DispatchMode):
    """Puts new tensors into an arena, lets views pass, and refuses what may depend on the step."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.parts: list[Any] = []
        """Runs of kernel calls, each a list, and what `_keep` makes of what stands between them."""
        self._arena = arena

    def add(self, call: RecordedCall) -> None:
        """A kernel was called."""
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
        raise RecordingError(f"{func} runs between the kernels")

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._arena.empty(shape, dtype)

    def _copy(self, source: Tensor, value: Tensor) -> Tensor:
        return value if _share_memory(source, value) else self._copied(source, value)

    def _copied(self, source: Tensor, value: Tensor) -> Tensor:
        out = self._empty(tuple(value.shape), value.dtype)
        self._keep(copying, out, source)
        return out

    def _keep(self, make: Callable[..., Computation], *operands: Any) -> None:
        """Do what is made of these between the kernels, now and whenever the tape is played."""
        again = make(*tree_map(self._arena.held_by_tape, operands))
        again()
        self.parts.append(again)

    def _seen(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Views of a tensor, if that is what they are: in inference mode torch also takes for one what may copy."""
        views = func(*args, **options)
        parts = [views] if isinstance(views, Tensor) else views
        if all(_share_memory(args[0], part) for part in parts):
            return views
        if isinstance(views, Tensor):
            return self._computed(func, args, options)
        raise RecordingError(f"{func} makes copies between the kernels")

    def _computed(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """One new tensor, or several."""
        value = func(*args, **options)
        values = [value] if isinstance(value, Tensor) else list(value)
        outs = [self._empty(tuple(part.shape), part.dtype) for part in values]
        self._keep(partial(computing, func), outs, args, options)
        return outs[0] if isinstance(value, Tensor) else tuple(outs)


def copying(target: Tensor, source: Tensor) -> Computation:
    """What copies a tensor."""

    def again() -> bool:
        target.copy_(source)
        return True

    return again


def computing(
    func: Any, targets: Sequence[Tensor], args: Sequence[Any], options: dict[str, Any]
) -> Computation:
    """What calls a function of torch and puts what it gives into tensors that are there."""
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
