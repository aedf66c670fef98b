"""Guesses by Medusa's heads: each says a token further on, all by the same hidden state.

That is the state behind which the request's last token was sampled, so heads cost no pass over tokens and no cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import activation_dtype
from quire.models.draft_heads.medusa import MedusaHeads
from quire.scheduler.output import NewRequestData
from quire.spec_decode.drafter import MODEL_KEYS
from quire.worker.guessing_memory import room_of_states, width_of_states
from quire.worker.guessing_model import GuessingModel, Rows
from quire.worker.inputs import StepInputs
from quire.worker.kept_states import KeptStates


class Medusa(GuessingModel):
    """See `GuessingModel`; `model` are the heads, loaded."""

    keys: ClassVar[frozenset[str]] = MODEL_KEYS["medusa"]

    def __init__(self, model: MedusaHeads, *parts: Any, config: EngineConfig, **limits: Any) -> None:
        super().__init__(model, *parts, config=config, **limits)
        self._heads = model
        sizes = self._batch.max_num_seqs, room_of_states(config), width_of_states(config)
        self._states = KeptStates(*sizes, activation_dtype(config), self._transfers)
        self._head = 0
        """The one that speaks next."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Nothing is kept before its first step."""

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Keep the states behind which something is sampled."""
        self._states.keep(inputs.layout, inputs.layout.ends - inputs.layout.num_samples, hidden)

    def _first(self, rows: Rows, ends: Rows) -> Rows:
        self._head = 0
        return self._next(rows, ends)

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        head = self._head
        if head == len(self._heads.blocks):
            return np.full(len(rows), -1, dtype=np.int64)
        self._head += 1
        hidden = self._states.at(rows, ends - 2 - head)
        return self._sampled(partial(self._heads.head_logits, head), hidden, rows, ends)

    def _limits(self, rows: Rows) -> Rows:
        """Guesses take no slots."""
        return np.full(len(rows), self._batch.max_model_len, dtype=np.int64)
