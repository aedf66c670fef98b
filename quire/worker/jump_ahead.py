"""Jumping ahead: where a grammar leaves one text only, such as the keys of an object, its tokens are guessed.

Invariant: they are guesses like any others (`quire.spec_decode`). A text can be cut into tokens in several ways, and
which of them the model takes is for it to say; so nothing is forced on it, and no token is another than without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheConfig
from quire.spec_decode.drafter import CERTAIN, NO_DRAFT, Draft, Text
from quire.worker.input_batch import InputBatch
from quire.worker.sampler.grammar import GrammarMask

MAX_REQUESTS = 4
"""In larger steps a row more costs what a row of a step costs, so a wrong guess takes what a right one gives."""


MOST = 8
"""Tokens that are guessed at a time, unless somebody says otherwise."""
MIN_LAYER_WIDTHS = 8192
"""Layers times hidden size. A step of a smaller model is as short as what guesses take of the host."""


def jump_ahead(
    config: EngineConfig, kv_config: KVCacheConfig, batch: InputBatch, grammars: GrammarMask
) -> JumpAhead | None:
    """Who guesses for this engine.

    Nobody does where the next step is planned before its guesses are known, or where right guesses are computed again,
    because a layer keeps a state.
    """
    most = config.structured_outputs.settings.jump_ahead
    if most is None:
        most = MOST if config.arch.num_layers * config.arch.hidden_size >= MIN_LAYER_WIDTHS else 0
    useless = config.num_tokens_ahead > 0 or not kv_config.rolls_back
    return JumpAhead(batch, grammars, most) if most and not useless else None


class JumpAhead:
    """A `Drafter` for requests that a grammar constrains.

    Args:
        batch: whose requests sample.
        grammars: has read of each text what it has to know, or will.
        most: tokens that are guessed at a time.
    """

    keys: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, batch: InputBatch, grammars: GrammarMask, most: int) -> None:
        self._batch = batch
        self._grammars = grammars
        self._most = most

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        if len(texts) > MAX_REQUESTS:
            return [NO_DRAFT] * len(texts)
        return [Draft(self._forced(text)[: self._most], CERTAIN) for text in texts]

    def forget(self, request_id: str) -> None:
        """The grammars know."""

    def _forced(self, text: Text) -> list[int]:
        return self._grammars.forced_tokens(self._batch.row(text.request_id), text.token_ids)
