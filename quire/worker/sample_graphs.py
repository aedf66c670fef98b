"""Graphs of what follows a forward pass: the output head, and the choice of a token by each row of logits.

They are apart from those of forward passes, of which there is one for each shape: a choice depends on the number of
samples and on what requests ask for, and whether these stand behind a step that decodes, verifies drafts or ends a
prompt is nothing to it. So there are as many graphs as shapes and kinds, and not as many as shapes times kinds; a
second replay costs some microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.worker.devices import Transfers
from quire.worker.graph_shapes import sample_sizes
from quire.worker.graphs import GraphRoom, Graphs, KeptRows, row_variant
from quire.worker.row_logits import RowLogits
from quire.worker.sampler import Sampled, Sampler
from quire.worker.sampler.placed import PlacedSettings, SampleKind
from quire.worker.sampler.sampler import NOTHING_STAGED, StagedRows

_NO_ROWS = np.zeros(0, dtype=np.int64)


class _Choice(NamedTuple):
    """What choices of one graph have in common."""

    size: int
    adapts: bool
    """Whether rows may have adapters."""
    kind: SampleKind

    @property
    def variant(self) -> Hashable:
        return row_variant(self.size), self.adapts, self.kind


class SampleGraphs:
    """Of samples by rows that have the model's tokens.

    Args:
        room: of the model's graphs; hidden states are read there.
        sampler: of such rows.
        most: samples at once.
        longest: most tokens before a sample.
        adapts: whether adapters are served.
    """

    def __init__(
        self,
        room: GraphRoom,
        logits: RowLogits,
        sampler: Sampler,
        transfers: Transfers,
        *,
        most: int,
        vocab_size: int,
        longest: int,
        adapts: bool,
    ) -> None:
        self._room = room
        self._logits = logits
        self._sampler = sampler
        self._sizes = sample_sizes(min(most, room.hidden.num_rows))
        self._adapts = (True, False) if adapts else (False,)
        self._settings = PlacedSettings(sampler, self._sizes[-1], vocab_size, longest, transfers)
        on = transfers.torch_device
        self._adapter_rows = torch.full((self._sizes[-1],), -1, dtype=torch.int32, device=on)
        self._graphs = Graphs[_Choice](room, self._launch, lambda key: key.variant, KeptRows(self._sizes[-1]))
        room.add(self._capture_all)

    def sample(self, staged: StagedRows, hidden: Tensor, adapter_rows: Tensor | None) -> Sampled | None:
        """Tokens by hidden states [N, H], and perhaps adapters [N]; None: no graph does what was staged for them."""
        kind, count = SampleKind.of(staged), len(hidden)
        if kind is None or not 0 < count <= self._sizes[-1] or not self._room.replays:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        key = _Choice(size, adapter_rows is not None, kind)
        self._room.hidden.take(hidden)
        if not kind.is_plain:
            self._settings.place(size, staged)
        if adapter_rows is not None:
            self._adapter_rows[:count].copy_(adapter_rows)
            self._adapter_rows[count:size].fill_(-1)
        self._graphs.capture(key)
        return Sampled(self._graphs.replay(key)[:count], None, _NO_ROWS, {})

    def _capture_all(self, only_largest: bool) -> int:
        self._room.hidden.clear()
        for size in reversed(self._sizes):
            self._settings.place(size, NOTHING_STAGED)
            for adapts in self._adapts:
                for kind in self._settings.kinds:
                    self._graphs.capture(_Choice(size, adapts, kind))
            if only_largest:
                break
        return len(self._graphs)

    def _launch(self, key: _Choice) -> Tensor:
        hidden = self._room.hidden.first(key.size)
        logits = self._logits.of_model(hidden, self._adapter_rows[: key.size] if key.adapts else None)
        return self._sampler.sample(logits, self._settings.staged(key.size, key.kind)).codes
