"""`ParkedWeights`: a model's weights on the host while its device's memory is wanted for something else.

Invariant: storages are emptied and filled again in place, so every parameter, view and packed matrix of the model stays
what it was; only the memory behind them goes and comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, UntypedStorage

from quire.models.base import CausalLM
from quire.worker.devices import Transfers


class ParkedWeights:
    """Takes the weights off the device when it is made; `restore` puts them back, once."""

    @torch.no_grad()
    def __init__(self, model: CausalLM, transfers: Transfers) -> None:
        self._transfers = transfers
        storages = list(_storages(model))
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


def _storages(model: CausalLM) -> Iterator[UntypedStorage]:
    """The memory behind all that a model holds, each piece once."""
    held = (tensor for _, layer in model.checkpoint_layers() for tensor in layer.tensors().values())
    seen: set[int] = set()
    for tensor in chain(model.parameters(), model.buffers(), held):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """uint8 [n]"""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
