"""A tape for steps of any size: recorded for a few, it is played for all others up to the largest of them.

What a kernel is told of a step's size, its numbers of requests and tokens, is in its arguments, and most often grows
evenly with each. So the arguments of a step are those of another one, and so much for each request and token more. The
same is true of where the tensors begin that torch computes with between the kernels, and of how long they are.

A step of one token is none of these: torch takes more of its tensors for contiguous.

Invariant: all sizes call the same kernels in the same turn, on tensors that begin where those of the largest step do;
a function of which that cannot be seen in the sizes that are recorded has no such tape.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from quire.kernels.cpu.arena import Arena
from quire.kernels.cpu.calls import RecordedCall, recording
from quire.kernels.cpu.tape import Computation, Recorder, RecordingError, Run

Numbers = NDArray[np.int64]


class StepSize(NamedTuple):
    """How many requests and tokens a step has."""

    requests: int
    tokens: int


_SMALL = (StepSize(1, 2), StepSize(1, 3), StepSize(2, 3))
"""Of the second one more is a token than of the first, and of the third one more a request than of the second."""
_ALSO = StepSize(2, 2)
"""What these three say is to be true of it, too, as it is to be of the largest."""


class _Part(Protocol):
    """What is done in turn, for any size."""

    def of(self, size: StepSize) -> Computation:
        """What does it for a step of this size, until it is asked for another one."""


class OpenTape:
    """Kernels, and what torch computes between them, whose arguments are set to a step's size before it is played.

    Args:
        result: of the largest size, a row for each token.
    """

    def __init__(self, parts: Sequence[_Part], result: Tensor) -> None:
        self._parts, self._result = parts, result
        self._size, self._steps = StepSize(0, 0), list[Computation]()

    def play(self, size: StepSize) -> bool:
        """Do it all for a step of this size; False if a kernel refused what it read: what follows it was not done."""
        if size != self._size:
            self._size, self._steps = size, [part.of(size) for part in self._parts]
        return all(step() for step in self._steps)

    def result(self, num_tokens: int) -> Tensor:
        """Where it leaves its result for so many tokens."""
        return self._result[:num_tokens]


def record_open(function: Callable[[StepSize], Tensor], largest: StepSize, arena: Arena) -> OpenTape:
    """Find out what a function does, for steps up to the largest; no kernel computes anything meanwhile.

    The function's inputs, which differ by size in their first dimension only, must stay where they are.

    Raises:
        RecordingError: it does more than a tape can hold; or what it does for one size does not follow from what it
            does for others.
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
    return OpenTape(
        [_opened(sizes, parts) for parts in zip(*recorded, strict=True)], arena.held_by_tape(result)
    )


def _differ() -> RecordingError:
    return RecordingError("steps of one size do otherwise than those of another")


def _check_result(one: Tensor, of_largest: Tensor, size: StepSize) -> None:
    expected = of_largest[: size.tokens]
    if (one.data_ptr(), one.shape, one.stride()) != (expected.data_ptr(), expected.shape, expected.stride()):
        raise RecordingError("what a small step gives is not the first rows of what a large one gives")


class _Growth:
    """Numbers that follow from a step's size: so much, more for each request, and for each token.

    Args:
        sizes: S of them, those of `_SMALL` first.
        numbers: [S, N] what is so for each size.
    """

    def __init__(self, sizes: Sequence[StepSize], numbers: Numbers) -> None:
        self.places: Numbers = (numbers != numbers[0]).any(axis=0).nonzero()[0]
        """Of the N those that differ."""
        seen = numbers[:, self.places]
        by_token, by_request = seen[1] - seen[0], seen[2] - seen[1]
        self._terms = np.stack((seen[0] - by_request - 2 * by_token, by_request, by_token))
        if not np.array_equal(np.array([(1, *size) for size in sizes]) @ self._terms, seen):
            raise RecordingError("what a kernel is told does not grow evenly with the step's size")

    def of(self, size: StepSize) -> Numbers:
        """Those that differ, for a size."""
        fixed, by_request, by_token = self._terms
        grown: Numbers = fixed + size.requests * by_request + size.tokens * by_token
        return grown


class _Calls(list[RecordedCall]):
    """Kernels without anything between them, as they were recorded."""

    def numbers(self) -> Numbers:
        """What is packed for them."""
        return np.frombuffer(b"".join(packed for _, packed in self), dtype=np.int64)

    def kinds(self) -> list[tuple[int, int]]:
        """What is the same for all sizes: which kernels, and how many arguments they have."""
        return [(address, len(packed)) for address, packed in self]

    def open(self, growth: _Growth) -> _Part:
        return _OpenRun(self, growth)


class _Between:
    """What torch computes, as it was recorded: a computation is made of operands, tensors and others, in a tree."""

    def __init__(self, make: Callable[..., Computation], operands: Sequence[Any]) -> None:
        self.make = make
        self.leaves, self.tree = tree_flatten(operands)

    def numbers(self) -> Numbers:
        """Of each tensor where it begins, its shape and its strides, and the integers."""
        return np.array([number for leaf in self.leaves for number in _numbers_of(leaf)], dtype=np.int64)

    def kinds(self) -> tuple[Any, TreeSpec, list[Any]]:
        """What is the same for all sizes."""
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
    """A part as it was recorded for these sizes, the last of which is the largest -> for any."""
    kinds = parts[0].kinds()
    if any(part.kinds() != kinds for part in parts):
        raise _differ()
    return parts[-1].open(_Growth(sizes, np.array([part.numbers() for part in parts])))


class _OpenRun:
    def __init__(self, calls: _Calls, growth: _Growth) -> None:
        self._run, self._growth = Run(calls), growth

    def of(self, size: StepSize) -> Computation:
        self._run.numbers[self._growth.places] = self._growth.of(size)
        return self._run


class _OpenBetween:
    """Its tensors are parts of those of the largest step."""

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
    """As `_numbers_of` told them."""
    if isinstance(leaf, Tensor):
        start, *rest = (next(numbers) for _ in range(1 + 2 * leaf.dim()))
        return leaf.as_strided(rest[: leaf.dim()], rest[leaf.dim() :], start)
    return next(numbers) if type(leaf) is int else leaf


class _Dry(Recorder):
    """Hears of kernels that do not run, and of what torch computes, of which only the shapes count.

    Args:
        places: where the tensors of another recording began, and how long they were; none: tensors are put where there
            is room, and `places` says where that was.
    """

    def __init__(self, arena: Arena, places: Sequence[tuple[int, int]]) -> None:
        super().__init__(arena)
        self.places: list[tuple[int, int]] = []
        self._given: Iterator[tuple[int, int]] | None = iter(places) if places else None

    def of(self, function: Callable[[StepSize], Tensor], size: StepSize) -> Tensor:
        """What the function gives, of which nothing is computed."""
        self._arena.begin()
        try:
            with recording.into(self.add, dry=self._scratch), self:
                return function(size)
        except (RuntimeError, IndexError, ValueError) as error:
            # Of numbers that nobody computed: if it is wrong with others, too, the step that follows says so.
            raise RecordingError(f"it fails where no kernel runs: {error}") from error

    def kept(self) -> list[_Calls | _Between]:
        """What was recorded, in turn."""
        return [_Calls(part) if isinstance(part, list) else part for part in self.parts]

    def _keep(self, make: Callable[..., Computation], *operands: Any) -> None:
        self.parts.append(_Between(make, tree_map(self._arena.held_by_tape, operands)))

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = self._placed(shape, dtype)
        return tensor if dtype.is_floating_point else tensor.zero_()  # whatever is looked up by it is there

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
        """As much as the largest step takes, so that its size is no number that differs."""
        if self._given is None:
            return self._placed((num_floats,), torch.float32)
        start, room = next(self._given, (0, -1))
        if 4 * num_floats > room:
            raise _differ()
        return self._arena.at(start, (room // 4,), torch.float32)
