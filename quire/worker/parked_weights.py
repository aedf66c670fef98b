"""`ParkedWeights`: weights of models on the host while its device's memory is wanted for something else.

Invariant: storages are emptied and filled again in place, so every parameter, view and packed matrix of the model stays
what it was; only the memory behind them goes and comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, UntypedStorage

from quire.models.base import CausalLM
from quire.worker.devices import Transfers


class ParkedWeights:
    """Takes the weights off the device when it is made; `restore` puts them back, once."""

    @torch.no_grad()
    def __init__(self, models: Sequence[CausalLM], transfers: Transfers) -> None:
        self._transfers = transfers
        storages = list(_storages(models))
        self._parked = [(storage, transfers.download(_bytes_of(storage))) for storage in storages]
        transfers.mark().wait()
        for storage in storages:
            storage.resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Raises RuntimeError: the device has no room; what is there again stays there, and may be asked for again."""
        for storage, content in self._parked:
            if storage.nbytes() != content.nbytes:
                storage.resize_(content.nbytes)
            _bytes_of(storage).copy_(self._transfers.upload(content))
        self._transfers.mark().wait()
        self._parked = []


def _storages(models: Sequence[CausalLM]) -> Iterator[UntypedStorage]:
    """The memory behind all that models hold, each piece once."""
    seen: set[int] = set()
    for tensor in chain.from_iterable(map(_held, models)):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _held(model: CausalLM) -> Iterator[Tensor]:
    held = (tensor for _, layer in model.checkpoint_layers() for tensor in layer.tensors().values())
    return chain(model.parameters(), model.buffers(), held)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """uint8 [n]"""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
