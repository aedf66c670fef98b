# SPDX-License-Identifier: Apache-2.0
"""Recorded kernel graph for steps of any size: recorded for a few sizes, replayed for all up to the largest.

A kernel's arguments depend on the step's numbers of requests and tokens, mostly linearly. So a step's arguments are
those of another size plus a constant per additional request and token. The same holds for addresses and shapes of
tensors that torch computes between the kernels. A step of one token is excluded: torch treats more of its tensors as
contiguous.

Invariant: all sizes call the same kernels in the same order, on tensors that begin where those of the largest step do;
a function for which the recorded sizes do not show this has no such graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from quire.kernels.cpu.arena import Arena
from quire.kernels.cpu.calls import RecordedCall, recording
from quire.kernels.cpu.recorded_graph import (
    Computation,
    GraphRecorder,
    KernelRun,
    RecordingError,
    may_be_recorded,
)
from quire.kernels.dispatch_mode import DispatchMode


class UnrecordedOps(DispatchMode):
    """Mode that finds the first torch operation that cannot be recorded, before the first request.

    Attributes:
        first: its name; None: there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.first is None and not may_be_recorded(func, args):
            self.first = str(func)
        return func(*args, **(kwargs or {}))


Numbers = NDArray[np.int64]


class StepSize(NamedTuple):
    """Numbers of requests and tokens of a step."""

    requests: int
    tokens: int


_SMALL = (StepSize(1, 2), StepSize(1, 3), StepSize(2, 3))
"""The second has one token more than the first, and the third one request more than the second."""
_ALSO = StepSize(2, 2)
"""Size for which the extrapolation from these three is checked, as it is for the largest."""


class _Part(Protocol):
    """Part of the graph, for any size."""

    def of(self, size: StepSize) -> Computation:
        """Return the computation for a step of this size, valid until the next call."""


class SizedGraph:
    """Kernels, and torch computations between them, whose arguments are set to a step's size before replay.

    Args:
        result: of the largest size, a row for each token.
    """

    def __init__(self, parts: Sequence[_Part], result: Tensor) -> None:
        self._parts, self._result = parts, result
        self._size, self._steps = StepSize(0, 0), list[Computation]()

    def replay(self, size: StepSize) -> bool:
        """Replay for a step of this size; False if a kernel refused its input: later parts were not run."""
        if size != self._size:
            self._size, self._steps = size, [part.of(size) for part in self._parts]
        return all(step() for step in self._steps)

    def result(self, num_tokens: int) -> Tensor:
        """Return the output of a step with this many tokens."""
        return self._result[:num_tokens]


def record_sized(function: Callable[[StepSize], Tensor], largest: StepSize, arena: Arena) -> SizedGraph:
    """Record a function for steps up to the largest; no kernel runs meanwhile.

    The function's inputs, which differ by size in their first dimension only, must keep their addresses.

    Raises:
        RecordingError: it does something that cannot be recorded, or its calls for one size do not follow from those
            for others.
        ArenaFullError: the largest step needs more memory than the arena has.
    """
    first = _Dry(arena, [])
    result = first.of(function, largest)
    recorded = []
    for size in (*_SMALL, _ALSO):
        again = _Dry(arena, first.places)
        _check_result(again.of(function, size), result, size)
        recorded.append(again.kept())
    recorded.append(first.kept())
    if len({len(parts) for parts in recorded}) > 1:
        raise _differ()
    sizes = (*_SMALL, _ALSO, largest)
    return SizedGraph(
        [_opened(sizes, parts) for parts in zip(*recorded, strict=True)], arena.unreserved(result)
    )


def _differ() -> RecordingError:
    return RecordingError("steps of different sizes make different calls")


def _check_result(one: Tensor, of_largest: Tensor, size: StepSize) -> None:
    expected = of_largest[: size.tokens]
    if (one.data_ptr(), one.shape, one.stride()) != (expected.data_ptr(), expected.shape, expected.stride()):
        raise RecordingError("a small step's output is not the first rows of a large one's")


class _Growth:
    """Numbers that are linear in a step's size: a constant, plus one for each request and each token.

    Args:
        sizes: S of them, those of `_SMALL` first.
        numbers: [S, N] the values for each size.
    """

    def __init__(self, sizes: Sequence[StepSize], numbers: Numbers) -> None:
        self.places: Numbers = (numbers != numbers[0]).any(axis=0).nonzero()[0]
        """Indices of the N that differ by size."""
        seen = numbers[:, self.places]
        by_token, by_request = seen[1] - seen[0], seen[2] - seen[1]
        self._terms = np.stack((seen[0] - by_request - 2 * by_token, by_request, by_token))
        if not np.array_equal(np.array([(1, *size) for size in sizes]) @ self._terms, seen):
            raise RecordingError("a kernel's arguments are not linear in the step's size")

    def of(self, size: StepSize) -> Numbers:
        """Return the differing numbers for a size."""
        fixed, by_request, by_token = self._terms
        grown: Numbers = fixed + size.requests * by_request + size.tokens * by_token
        return grown


class _Calls(list[RecordedCall]):
    """Recorded kernel calls without torch computations between them."""

    def numbers(self) -> Numbers:
        """Return their packed arguments."""
        return np.frombuffer(b"".join(packed for _, packed in self), dtype=np.int64)

    def kinds(self) -> list[tuple[int, int]]:
        """Return what must be equal for all sizes: the kernels and their numbers of arguments."""
        return [(address, len(packed)) for address, packed in self]

    def open(self, growth: _Growth) -> _Part:
        return _OpenRun(self, growth)


class _Between:
    """Recorded torch computation, made from operands (tensors and others) in a tree."""

    def __init__(self, make: Callable[..., Computation], operands: Sequence[Any]) -> None:
        self.make = make
        self.leaves, self.tree = tree_flatten(operands)

    def numbers(self) -> Numbers:
        """Return the integers, and the address, shape and strides of each tensor."""
        return np.array([number for leaf in self.leaves for number in _numbers_of(leaf)], dtype=np.int64)

    def kinds(self) -> tuple[Any, TreeSpec, list[Any]]:
        """Return what must be equal for all sizes."""
        function = getattr(self.make, "args", self.make)
        return function, self.tree, [_kind_of(leaf) for leaf in self.leaves]

    def open(self, growth: _Growth) -> _Part:
        return _OpenBetween(self, growth)


def _numbers_of(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, Tensor):
        return leaf.storage_offset(), *leaf.shape, *leaf.stride()
    return (leaf,) if type(leaf) is int else ()


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.untyped_storage().data_ptr(), leaf.dtype, leaf.dim()
    return int if type(leaf) is int else (type(leaf), leaf)


def _opened(sizes: Sequence[StepSize], parts: Sequence[_Calls | _Between]) -> _Part:
    """Return the part for any size, from its recordings for these sizes, the last of which is the largest."""
    kinds = parts[0].kinds()
    if any(part.kinds() != kinds for part in parts):
        raise _differ()
    return parts[-1].open(_Growth(sizes, np.array([part.numbers() for part in parts])))


class _OpenRun:
    def __init__(self, calls: _Calls, growth: _Growth) -> None:
        self._run, self._growth = KernelRun(calls), growth

    def of(self, size: StepSize) -> Computation:
        self._run.numbers[self._growth.places] = self._growth.of(size)
        return self._run


class _OpenBetween:
    """Its tensors are views of those of the largest step."""

    def __init__(self, largest: _Between, growth: _Growth) -> None:
        self._largest, self._growth = largest, growth
        self._numbers = largest.numbers()

    def of(self, size: StepSize) -> Computation:
        largest = self._largest
        self._numbers[self._growth.places] = self._growth.of(size)
        numbers = iter(self._numbers.tolist())
        leaves = [_with_numbers(leaf, numbers) for leaf in largest.leaves]
        return largest.make(*tree_unflatten(leaves, largest.tree))


def _with_numbers(leaf: Any, numbers: Iterator[int]) -> Any:
    """Replace an operand's numbers, in the order of `_numbers_of`."""
    if isinstance(leaf, Tensor):
        start, *rest = (next(numbers) for _ in range(1 + 2 * leaf.dim()))
        return leaf.as_strided(rest[: leaf.dim()], rest[leaf.dim() :], start)
    return next(numbers) if type(leaf) is int else leaf


class _Dry(GraphRecorder):
    """Recorder that runs no kernels, and torch computations only for their shapes.

    Args:
        places: addresses and lengths of another recording's tensors; empty: tensors are allocated, and `places` records
            where.
    """

    def __init__(self, arena: Arena, places: Sequence[tuple[int, int]]) -> None:
        super().__init__(arena)
        self.places: list[tuple[int, int]] = []
        self._given: Iterator[tuple[int, int]] | None = iter(places) if places else None

    def of(self, function: Callable[[StepSize], Tensor], size: StepSize) -> Tensor:
        """Return the function's output, with undefined values."""
        self._arena.begin()
        try:
            with recording.into(self.add, dry=self._scratch), self:
                return function(size)
        except (RuntimeError, IndexError, ValueError) as error:
            # The values were never computed: if the function also fails with real ones, the next step reports it.
            raise RecordingError(f"it fails where no kernel runs: {error}") from error

    def kept(self) -> list[_Calls | _Between]:
        """Return the recorded parts, in order."""
        return [_Calls(part) if isinstance(part, list) else part for part in self.parts]

    def _keep(self, make: Callable[..., Computation], *operands: Any) -> None:
        self.parts.append(_Between(make, tree_map(self._arena.unreserved, operands)))

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self._placed(shape, dtype)
        return tensor if dtype.is_floating_point else tensor.zero_()  # a valid index for any lookup

    def _placed(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._given is None:
            tensor = self._arena.empty(shape, dtype)
            self.places.append((self._arena.start_of(tensor), tensor.nbytes))
            return tensor
        start, room = next(self._given, (0, -1))
        tensor = self._arena.at(start, shape, dtype)
        if tensor.nbytes > room:
            raise _differ()
        return tensor

    def _scratch(self, num_floats: int) -> Tensor:
        """Return as much scratch memory as the largest step needs, so that its size does not vary."""
        if self._given is None:
            return self._placed((num_floats,), torch.float32)
        start, room = next(self._given, (0, -1))
        if 4 * num_floats > room:
            raise _differ()
        return self._arena.at(start, (room // 4,), torch.float32)
