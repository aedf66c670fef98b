# SPDX-License-Identifier: Apache-2.0
"""Jump-ahead decoding: drafts the tokens that a grammar forces, such as the keys of an object.

Invariant: they are drafts like any other (`quire.spec_decode`). A text can be tokenized in several ways, and the model
decides among them; so output is the same as without jump-ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheConfig
from quire.spec_decode.drafter import CERTAIN, NO_DRAFT, Draft, Text
from quire.worker.input_batch import InputBatch
from quire.worker.sampler import Sampler

MAX_REQUESTS = 4  # in larger steps every row costs, so a wrong draft loses what a right one gains
MOST = 8  # default number of drafts
MIN_LAYER_WIDTHS = (
    8192  # layers x hidden size; a step of a smaller model is no longer than drafting on the host
)


def jump_ahead(
    config: EngineConfig, kv_config: KVCacheConfig, batch: InputBatch, sampler: Sampler
) -> JumpAhead | None:
    """Return the jump-ahead drafter of this engine, or None.

    It is disabled where the next step is planned before its drafts exist, and where accepted drafts are recomputed
    because a layer keeps a state.
    """
    most = config.structured_outputs.settings.jump_ahead
    if most is None:
        most = MOST if config.arch.num_layers * config.arch.hidden_size >= MIN_LAYER_WIDTHS else 0
    useless = config.num_tokens_ahead > 0 or not kv_config.rolls_back
    return JumpAhead(batch, sampler, most) if most and not useless else None


class JumpAhead:
    """`Drafter` for requests with a grammar.

    Args:
        batch: rows of the requests.
        sampler: has the grammar state of each row.
        most: most drafts of a request.
    """

    keys: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, batch: InputBatch, sampler: Sampler, most: int) -> None:
        self._batch = batch
        self._sampler = sampler
        self._most = most

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        if len(texts) > MAX_REQUESTS:
            return [NO_DRAFT] * len(texts)
        return [Draft(self._forced(text)[: self._most], CERTAIN) for text in texts]

    def forget(self, request_id: str) -> None:
        """Do nothing: the sampler holds the state."""

    def _forced(self, text: Text) -> list[int]:
        return self._sampler.forced_tokens(self._batch.row(text.request_id), text.token_ids)
