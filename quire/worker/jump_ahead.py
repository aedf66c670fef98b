"""Jumping ahead: where a grammar leaves one text only, such as the keys of an object, its tokens are guessed.

Invariant: they are guesses like any others (`quire.worker.drafts`). A text can be cut into tokens in several ways, and
which of them the model takes is for it to say; so nothing is forced on it, and no token is another than without.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheConfig
from quire.worker.input_batch import InputBatch
from quire.worker.sampler.grammar import GrammarMask

MAX_REQUESTS = 4
"""In larger steps a row more costs what a row of a step costs, so a wrong guess takes what a right one gives."""


MOST = 8
"""Tokens that are guessed at a time, unless somebody says otherwise."""
MIN_LAYER_WIDTHS = 8192
"""Layers times hidden size. A step of a smaller model is short, and longer with guesses, which no tape has."""


def jump_ahead(
    config: EngineConfig, kv_config: KVCacheConfig, batch: InputBatch, grammars: GrammarMask
) -> JumpAhead | None:
    """Who guesses for this engine.

    Nobody does where steps overlap, as the next step is planned before its guesses are known, or where right guesses
    are computed again, because a layer keeps a state.
    """
    most = config.structured_outputs.settings.jump_ahead
    if most is None:
        most = MOST if config.arch.num_layers * config.arch.hidden_size >= MIN_LAYER_WIDTHS else 0
    useless = config.scheduler.async_scheduling or not kv_config.rolls_back
    return JumpAhead(batch, grammars, most) if most and not useless else None


class JumpAhead:
    """A `Drafter` for requests that a grammar constrains.

    Args:
        batch: whose requests sample.
        grammars: has read of each text what it has to know, or will.
        most: tokens that are guessed at a time.
    """

    def __init__(self, batch: InputBatch, grammars: GrammarMask, most: int) -> None:
        self._batch = batch
        self._grammars = grammars
        self._most = most

    def propose(self, known: Mapping[str, NDArray[np.int32]]) -> dict[str, list[int]]:
        if len(known) > MAX_REQUESTS:
            return {}
        found = {name: self._forced(name, tokens) for name, tokens in known.items()}
        return {name: token_ids for name, token_ids in found.items() if token_ids}

    def _forced(self, name: str, known: NDArray[np.int32]) -> list[int]:
        return self._grammars.forced_tokens(self._batch.row(name), known)[: self._most]
