# SPDX-License-Identifier: Apache-2.0
"""`ParkedWeights`: model weights offloaded to the host to free device memory.

Invariant: storages are emptied and refilled in place, so parameters, views and packed weights keep their identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, UntypedStorage

from quire.models.base import CausalLM
from quire.worker.transfers import Transfers


class ParkedWeights:
    """Offloads the weights on construction; `restore` copies them back, once."""

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
        """Copy the weights back.

        Raises:
            RuntimeError: the device is out of memory; restored weights stay, and the call may be repeated.
        """
        for storage, content in self._parked:
            if storage.nbytes() != content.nbytes:
                storage.resize_(content.nbytes)
            _bytes_of(storage).copy_(self._transfers.upload(content))
        self._transfers.mark().wait()
        self._parked = []


def _storages(models: Sequence[CausalLM]) -> Iterator[UntypedStorage]:
    """Yield each storage of the models once."""
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
    """Return a storage as uint8 [n]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
