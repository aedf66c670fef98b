# SPDX-License-Identifier: Apache-2.0
"""Captured output head and sampler."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.worker.graphs import GraphCache, GraphMemory, RowBuffer, row_variant, sample_sizes
from quire.worker.sampler import Sampled, Sampler
from quire.worker.sampler.sampler import NOTHING_STAGED, StagedRows
from quire.worker.sampler.settings import SampleKind, SettingsBuffer
from quire.worker.sampling import RowLogits
from quire.worker.transfers import Transfers

_NO_ROWS = np.zeros(0, dtype=np.int64)


class _SampleKey(NamedTuple):
    """Key of a sampling graph."""

    size: int
    adapts: bool
    """True if rows may have adapters."""
    kind: SampleKind

    @property
    def variant(self) -> Hashable:
        return row_variant(self.size), self.adapts, self.kind


class SampleGraphs:
    """Captured sampling of rows without added tokens: output head and sampler.

    Sampling depends on the number of samples and on what requests ask for, not on the shape of the forward pass.
    Separate graphs make shapes + kinds in place of shapes x kinds; the second replay costs microseconds.

    Args:
        room: graph memory shared with the model; hidden states are read there.
        sampler: sampler of rows without added tokens.
        most: most samples at once.
        longest: most tokens before a sample.
        adapts: True if adapters are served.
    """

    def __init__(
        self,
        room: GraphMemory,
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
        self._settings = SettingsBuffer(sampler, self._sizes[-1], vocab_size, longest, transfers)
        on = transfers.torch_device
        self._adapter_rows = torch.full((self._sizes[-1],), -1, dtype=torch.int32, device=on)
        self._graphs = GraphCache[_SampleKey](
            room, self._launch, lambda key: key.variant, RowBuffer(self._sizes[-1])
        )
        room.add(self._capture_all)

    def sample(self, staged: StagedRows, hidden: Tensor, adapter_rows: Tensor | None) -> Sampled | None:
        """Sample by hidden states [N, H], and adapters [N]; return None if no graph fits what was staged."""
        kind, count = SampleKind.of(staged), len(hidden)
        if kind is None or not 0 < count <= self._sizes[-1] or not self._room.replays:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        key = _SampleKey(size, adapter_rows is not None, kind)
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
                    self._graphs.capture(_SampleKey(size, adapts, kind))
            if only_largest:
                break
        return len(self._graphs)

    def _launch(self, key: _SampleKey) -> Tensor:
        hidden = self._room.hidden.first(key.size)
        logits = self._logits.of_model(hidden, self._adapter_rows[: key.size] if key.adapts else None)
        return self._sampler.sample(logits, self._settings.staged(key.size, key.kind)).codes
