"""How much memory a step takes beside weights and KV cache, measured on a short one.

Invariant: a bound from above. What a forward pass allocates is a part that does not depend on the number of tokens plus
a part that is proportional to it, so the peak per token of a short pass is no less than that of a long one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quire.kernels.dispatch_mode import DispatchMode
from quire.worker.inputs import StepInputs
from quire.worker.pipeline import Forward

TAPE_SLACK = 2.0
"""An arena over the tensors that are in it at one time; gaps between them were seen to take up to 0.6 of them."""
GAPS = 1.25
"""The same of large tensors alone."""
LOGITS_ARRAYS = 3
"""As the model gives them, as they are kept for logprobs, and what sampling writes down of their order."""
FLOAT_BYTES = 4


class AllocationPeak(DispatchMode):
    """While active: the most bytes of tensors at one time that were made since it began, on any device.

    Counts what torch operations return; what they, or kernels, allocate for themselves is small and not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._live = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, list(kwargs.values())))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:  # else a view of an argument, or the argument itself
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self._live += num_bytes
        self.bytes = max(self.bytes, self._live)
        weakref.finalize(storage, self._free, num_bytes)

    def _free(self, num_bytes: int) -> None:
        self._live -= num_bytes


class ForwardPeak:
    """What the forward passes that were measured took at most, per token."""

    def __init__(self) -> None:
        self._bytes_per_token = 0

    def measured(self, forward: Forward) -> Forward:
        """The same pass, and its peak is taken in."""

        def run(inputs: StepInputs) -> Tensor:
            with AllocationPeak() as peak:
                hidden = forward(inputs)
            self._bytes_per_token = max(self._bytes_per_token, -(-peak.bytes // len(inputs.input_ids)))
            return hidden

        return run

    @property
    def is_measured(self) -> bool:
        """Whether there was a pass."""
        return self._bytes_per_token > 0

    def bytes_of_step(self, num_tokens: int, num_logits: int) -> int:
        """A step of so many tokens, of which so many logits exist at once."""
        return self._bytes_per_token * num_tokens + LOGITS_ARRAYS * num_logits * FLOAT_BYTES

    def bytes_of_tapes(self, num_tokens: int) -> int:
        """What recorded passes over at most so many tokens keep for their tensors."""
        return int(TAPE_SLACK * self._bytes_per_token * num_tokens)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
