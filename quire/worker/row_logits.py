"""Logits of rows: for the model's tokens, and for those that a row's adapter has added to them.

Invariant: how wide a row's logits are depends on its own adapter, whoever is beside it: what is summed over a row has
the bits that its width makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import EngineError
from quire.worker.devices import Transfers
from quire.worker.first_tokens import FirstTokens
from quire.worker.input_batch import InputBatch
from quire.worker.pipeline import LanguageModel

_NONE: NDArray[np.int64] = np.zeros(1, dtype=np.int64)


class RowLogits:
    """Makes them.

    Args:
        vocab_size: the model's tokens, V.
        max_added: that an adapter may add, A.

    Attributes:
        first: finds the likeliest tokens where ranks share the model's; None: there is no shorter way than all logits.
    """

    def __init__(
        self, model: LanguageModel, batch: InputBatch, vocab_size: int, max_added: int, transfers: Transfers
    ) -> None:
        self._model = model
        self._batch = batch
        self._vocab_size = vocab_size
        self._max_added = max_added
        self._transfers = transfers
        self.first = FirstTokens.of_model(model)

    def widths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N] V or V + A: logits of each of the rows [N]."""
        return self._vocab_size + self._max_added * (self._num_added(rows) > 0)

    def num_tokens(self, row: int) -> int:
        """Those that a row may have."""
        return self._vocab_size + int(self._num_added(np.array([row]))[0])

    def of(self, hidden: Tensor, adapter_rows: Tensor | None, rows: NDArray[np.int64]) -> Tensor:
        """hidden [N, H], and perhaps the adapter of each [N], -> float32, all of one width, that of these rows [N].

        A model is asked of hidden states alone where nothing is adapted: some take nothing else.

        Raises:
            EngineError: the model has made others, which is a bug of ours.
        """
        added = self._max_added if self._num_added(rows[:1]).any() else 0
        logits = self._computed(hidden, adapter_rows, added)
        if added:
            self._remove_others(logits, rows)
        return logits

    def of_model(self, hidden: Tensor, adapter_rows: Tensor | None) -> Tensor:
        """The same of rows that have the model's tokens, whichever they are."""
        return self._computed(hidden, adapter_rows, 0)

    def are_of_model(self, rows: NDArray[np.int64]) -> bool:
        """Whether all of the rows [N] have the model's tokens and no others."""
        return not self._are_several or not self._num_added(rows).any()

    def _computed(self, hidden: Tensor, adapter_rows: Tensor | None, added: int) -> Tensor:
        adapted = () if adapter_rows is None else (adapter_rows, added)
        logits = self._model.compute_logits(hidden, *adapted).contiguous()
        if logits.shape[1] != self._vocab_size + added:
            raise EngineError(
                f"the model gave {logits.shape[1]} logits for {self._vocab_size + added} tokens"
            )
        return logits

    def runs(self, rows: NDArray[np.int64], most: int) -> Iterator[slice]:
        """Neighbours among the rows [N], of one width and at most so many."""
        changes = (np.diff(self.widths(rows)).nonzero()[0] + 1).tolist() if self._are_several else []
        for start, end in pairwise([0, *changes, len(rows)]):
            yield from (slice(i, min(i + most, end)) for i in range(start, end, most))

    @property
    def _are_several(self) -> bool:
        """Whether rows may have other tokens than the model's."""
        return self._batch.adapters is not None and self._batch.adapters.add_tokens

    def _num_added(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        adapters = self._batch.adapters
        return _NONE if adapters is None else adapters.num_added(rows)

    def _remove_others(self, logits: Tensor, rows: NDArray[np.int64]) -> None:
        """Of the tokens behind the model's, those that are none of the row's."""
        ends = self._transfers.upload(torch.from_numpy(self._vocab_size + self._num_added(rows)))
        ids = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(ids >= ends[:, None], -torch.inf)
