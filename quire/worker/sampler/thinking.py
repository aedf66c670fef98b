"""`thinking_token_budget`: the end of a section of reasoning is forced once it has so many generated tokens.

Invariant: what is forced is a function of the tokens before it. An end that the model has begun itself is completed,
and not begun again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling_extras import ThinkingMarkers
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.sampler.feature import LogitsFeature


class Place(NamedTuple):
    """The end of a sequence of tokens, as far as reasoning is concerned."""

    is_inside: bool
    """Whether a section is open."""
    num_generated: int
    """Generated tokens of that section."""
    tail: tuple[int, ...]
    """The last tokens since the last marker, of which the next marker may have been begun."""


class Section:
    """Follows sections through a sequence of tokens: `start_ids` opens one, `end_ids` closes it."""

    def __init__(self, markers: ThinkingMarkers, budget: int) -> None:
        self._markers = markers
        self._budget = budget
        self._longest = max(len(markers.start_ids), len(markers.end_ids))

    def after_prompt(self, tokens: NDArray[np.int32]) -> Place:
        """The place behind a prompt, of which no token counts."""
        start, end = self._markers.start_ids, self._markers.end_ids
        if self._markers.starts_open is not None:
            return Place(self._markers.starts_open, 0, ())
        place = Place(False, 0, ())
        if len(start) == len(end) == 1 and start != end:  # then the last one in it decides
            marks = np.flatnonzero((tokens == start[0]) | (tokens == end[0]))
            last = int(marks[-1]) if len(marks) else -1
            return place._replace(is_inside=bool(last >= 0 and tokens[last] == start[0]))
        for token in tokens.tolist():
            place = self.next(place, token)._replace(num_generated=0)
        return place

    def next(self, place: Place, token: int) -> Place:
        """The place behind one more token, which was generated."""
        tail = (*place.tail, token)
        marker = self._markers.end_ids if place.is_inside else self._markers.start_ids
        if tail[-len(marker) :] == marker:
            return Place(not place.is_inside, 0, ())
        return Place(place.is_inside, place.num_generated + place.is_inside, tail[-self._longest :])

    def forced(self, place: Place) -> int | None:
        """The token that must come next; None if it may be any."""
        if not place.is_inside or place.num_generated < self._budget:
            return None
        end = self._markers.end_ids
        begun = next(k for k in range(len(end) - 1, -1, -1) if k == 0 or place.tail[-k:] == end[:k])
        return end[begun]


class _Row:
    """A request's section, followed up to its first `num_followed` tokens."""

    def __init__(self, section: Section, tokens: NDArray[np.int32], num_prompt_tokens: int) -> None:
        self.section = section
        self.place = section.after_prompt(tokens[:num_prompt_tokens])
        self.num_followed = num_prompt_tokens

    def follow(self, tokens: NDArray[np.int32], num_tokens: int) -> None:
        """Take in what was generated up to `num_tokens`."""
        self.place = self.place_behind(tokens[:num_tokens])
        self.num_followed = max(self.num_followed, num_tokens)

    def place_behind(self, tokens: NDArray[np.int32]) -> Place:
        """The place behind these tokens, of which the last may be drafts."""
        place = self.place
        for token in tokens[self.num_followed :].tolist():
            place = self.section.next(place, token)
        return place


class StagedForce(NamedTuple):
    users: Tensor
    """[U] of the step's samples."""
    token_ids: Tensor
    """[U] the token that each must have."""


class ThinkingBudget(LogitsFeature[StagedForce]):
    """Only the next token of the end marker is left once the budget is used up, whatever else forbids it."""

    reads_tokens = True

    def __init__(self, batch: InputBatch, vocab_size: int) -> None:
        super().__init__(batch.max_num_seqs)
        self._batch = batch
        self._rows: dict[int, _Row] = {}

    def wants(self, params: SamplingParams) -> bool:
        return params.thinking_token_budget is not None

    def _store(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        assert params.thinking_markers is not None
        assert params.thinking_token_budget is not None
        section = Section(params.thinking_markers, params.thinking_token_budget)
        tokens = np.array(request.token_ids, dtype=np.int32)
        self._rows[row] = _Row(section, tokens, request.num_prompt_tokens)

    def _forget(self, row: int) -> None:
        del self._rows[row]

    def _stage(self, samples: Samples, users: NDArray[np.int64]) -> StagedForce | None:
        forced = {int(i): self._forced(int(samples.rows[i]), int(samples.columns[i])) for i in users}
        found = {i: token for i, token in forced.items() if token is not None}
        return StagedForce(_ids(list(found)), _ids(list(found.values()))) if found else None

    def _forced(self, row: int, column: int) -> int | None:
        mine, tokens = self._rows[row], self._batch.token_ids[row]
        mine.follow(tokens, min(int(self._batch.num_tokens[row]), column))
        return mine.section.forced(mine.place_behind(tokens[:column]))

    def apply(self, logits: Tensor, staged: StagedForce) -> None:
        logits.index_fill_(0, staged.users, -torch.inf)
        logits[staged.users, staged.token_ids] = 0.0


def _ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
