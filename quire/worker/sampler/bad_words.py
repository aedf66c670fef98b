"""Words, as sequences of tokens, that are not generated: `bad_words`.

Invariant: what is forbidden next is a function of the generated tokens before it; a prompt's end forbids nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import LogitsFeature, flat_indices
from quire.worker.sampler.masks import StagedIds


class WordTable(NamedTuple):
    """The words of one request, by the token before their last one."""

    single: list[int]
    """Tokens that are a word by themselves."""
    longer: dict[int, list[tuple[list[int], int]]]
    """The last token but one -> (all tokens but the last, the last)."""
    longest: int
    """Tokens of the longest word, less one."""

    @staticmethod
    def of(words: Sequence[Sequence[int]]) -> WordTable:
        longer: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                longer.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        single = [word[0] for word in words if len(word) == 1]
        return WordTable(single, longer, max(map(len, words)) - 1)

    def forbidden_after(self, output: list[int]) -> list[int]:
        """The tokens that would end a word behind the last `longest` tokens of an output, or all if it has fewer."""
        begun = self.longer.get(output[-1], []) if output else []
        ends = [last for start, last in begun if output[-len(start) :] == start]
        return list(dict.fromkeys([*self.single, *ends]))


class BadWords(LogitsFeature[StagedIds]):
    """The token that would complete a bad word gets probability 0."""

    reads_tokens = True

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._vocab_size = vocab_size
        self._tables: dict[int, WordTable] = {}

    def wants(self, params: SamplingParams) -> bool:
        return bool(params.bad_words_token_ids)

    def _store(self, row: int, request: NewRequestData) -> None:
        self._tables[row] = WordTable.of(request.sampling_params.bad_words_token_ids)

    def _forget(self, row: int) -> None:
        del self._tables[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedIds | None:
        forbidden = [self._forbidden(int(samples.rows[i]), int(samples.columns[i])) for i in users]
        flat = flat_indices(users, forbidden, self._vocab_size)
        return StagedIds(torch.from_numpy(users), flat) if len(flat) else None

    def _forbidden(self, row: int, column: int) -> NDArray[np.int64]:
        table = self._tables[row]
        start = max(int(self._batch.num_prompt_tokens[row]), column - table.longest)
        output: list[int] = self._batch.token_ids[row, start:column].tolist()
        return np.array(table.forbidden_after(output), dtype=np.int64)

    def apply(self, logits: Tensor, staged: StagedIds) -> None:
        logits.view(-1)[staged.flat] = -torch.inf
