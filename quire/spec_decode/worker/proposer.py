# SPDX-License-Identifier: Apache-2.0
"""Base of proposers that draft with a model or heads, token after token for all requests of a step.

A draft token is sampled by the engine's sampler from the draft model's logits: with the request's parameters,
penalties and grammar, and with the noise of its position. Two models with nearly equal probabilities then nearly
always sample the same token, at any temperature. (Coupling by common random numbers; see M. Daliri et al., "Coupling
without Communication and Drafter-Invariant Speculative Decoding", 2024.)

Invariant: drafts affect time only. They stand in the host's rows after the tokens, not in a device's, where in-flight
steps may have sampled; a pass over drafts gets their ids as input.

Shapes: H hidden size, W size of the target's states that heads read per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.config.speculative import EAGLE, EAGLE3, MTP
from quire.layers.base import activation_dtype
from quire.scheduler.output import NewRequestData
from quire.spec_decode.drafter import NO_DRAFT, Draft, Text
from quire.spec_decode.worker.jump_ahead import MOST as MOST_JUMP_AHEAD
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.pipeline import LanguageModel, Pipeline
from quire.worker.sampler import Sampler
from quire.worker.transfers import Transfers

MOST_KEPT = 32  # states kept per row for autoregressive heads, unless a step brings more
CHAINS = (EAGLE, EAGLE3, MTP)  # methods with autoregressive heads


def num_kept_states(config: EngineConfig) -> int:
    """Return the states kept per row: those sampled from in a step and in the in-flight steps."""
    settings, jump = config.speculative.settings, config.structured_outputs.settings.jump_ahead
    drafts = max(settings.most_drafts + config.num_tokens_ahead, MOST_JUMP_AHEAD if jump is None else jump)
    return max(1 + drafts, MOST_KEPT if settings.method in CHAINS else 0)


def state_width(config: EngineConfig) -> int:
    """Return W."""
    draft = None if config.draft is None else config.draft.arch.draft
    assert draft is not None, "only draft heads read states"
    return config.arch.hidden_size * max(len(draft.reads), 1)


def uses_draft_heads(config: EngineConfig) -> bool:
    """Return whether drafts come from heads."""
    return config.draft is not None and config.draft.arch.draft is not None


def kept_bytes(config: EngineConfig) -> int:
    """Return the bytes of the states kept for heads, and of one state of theirs per row."""
    if not uses_draft_heads(config):
        return 0
    each = num_kept_states(config) * state_width(config) + config.arch.hidden_size
    return config.scheduler.max_num_seqs * each * activation_dtype(config).itemsize


def passing_bytes(config: EngineConfig) -> int:
    """Return the temporary bytes per token of a heads' pass.

    They hold the target's states, what heads read of them, and the resulting state.
    """
    if not uses_draft_heads(config):
        return 0
    width, size = state_width(config), config.arch.hidden_size
    return (size + 2 * width + size) * activation_dtype(config).itemsize


Rows = NDArray[np.int64]


class StateRing:
    """Ring of `room` hidden states [W] for each of `num_rows` rows, on the device.

    Invariant: it holds the last kept positions of each row; states of rejected drafts are overwritten at their
    positions.
    """

    def __init__(
        self, num_rows: int, room: int, width: int, dtype: torch.dtype, transfers: Transfers
    ) -> None:
        self._room = room
        self._transfers = transfers
        self._states = torch.empty(num_rows * room, width, dtype=dtype, device=transfers.torch_device)

    def keep(self, layout: StepLayout, starts: Rows, states: Tensor) -> None:
        """Keep of a step's states [T, W], perhaps padded, those of each request from position `starts` [R] on."""
        counts = layout.ends - starts
        positions = positions_of(starts, counts)
        if not len(positions):
            return
        indices = positions + (layout.query_start_loc[:-1] - layout.starts).repeat(counts)
        numbers = np.stack((self._places(layout.rows.repeat(counts), positions), indices))
        places, sources = self._transfers.upload(torch.from_numpy(numbers))
        self._states.index_copy_(0, places, states.index_select(0, sources))

    def at(self, rows: Rows, positions: Rows) -> Tensor:
        """Return [N, W] the states of rows [N] at positions [N]."""
        places = self._transfers.upload(torch.from_numpy(self._places(rows, positions)))
        return self._states.index_select(0, places)

    def _places(self, rows: Rows, positions: Rows) -> Rows:
        places: Rows = rows * self._room + positions % self._room
        return places


def without_media(inputs: StepInputs) -> StepInputs:
    """Return inputs without embeddings of media, which are the target's: drafts after an image are from text alone."""
    step = inputs.step
    return inputs if step.media is None else replace(inputs, step=replace(step, media=None))


def positions_of(starts: Rows, counts: Rows) -> Rows:
    """Return [N] the positions of all tokens: `counts` [R] of each request, from `starts` [R] on."""
    before = counts.cumsum() - counts
    positions: Rows = np.arange(counts.sum()) + (starts - before).repeat(counts)
    return positions


Logits = Callable[[Tensor], Tensor]
"""Maps [N, H] to float32 [N, V], which may be changed."""


class _Active(NamedTuple):
    """Rows [R] still drafted for: their tokens, drafts included, and the most that may be computed."""

    rows: Rows
    ends: Rows
    limits: Rows

    def only(self, which: NDArray[np.bool_]) -> _Active:
        return _Active(self.rows[which], self.ends[which], self.limits[which])


class ModelProposer:
    """`Drafter` with a model; subclasses decide how it processes the tokens so far.

    Args:
        model: loaded, its KV cache bound.
        batch: the target's batch; drafts are written after the tokens, where values do not count.
        pipeline: pipeline of the draft model on these rows.
        sampler: the target's sampler.
        transfers: transfers to the device of both models.
        config: the target's config.
        slice_size: most rows of logits that exist at once.
    """

    keys: ClassVar[frozenset[str]] = frozenset()
    takes_time: ClassVar[bool] = True

    def __init__(
        self,
        model: LanguageModel,
        batch: InputBatch,
        pipeline: Pipeline,
        sampler: Sampler,
        transfers: Transfers,
        *,
        config: EngineConfig,
        slice_size: int,
    ) -> None:
        self._model = model
        self._batch = batch
        self._pipeline = pipeline
        self._sampler = sampler
        self._transfers = transfers
        self._max_num_tokens = config.scheduler.max_num_batched_tokens
        self._slice_size = slice_size

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the state of a request that was given a row."""
        raise NotImplementedError

    def remove_request(self, row: int) -> None:
        """Do nothing: the scheduler owns its blocks."""

    def forget(self, request_id: str) -> None:
        """Do nothing: state is by row."""

    def follow(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Process a computed step before it is sampled; `hidden` are its states [T, H], perhaps padded.

        The next step may overwrite both.
        """
        raise NotImplementedError

    def _first(self, rows: Rows, ends: Rows) -> Rows:
        """Return the token after the `ends` [R] tokens of these rows; negative where no draft is made."""
        raise NotImplementedError

    def _next(self, rows: Rows, ends: Rows) -> Rows:
        """Return the token after the `ends` [R] tokens of these rows, the last of which was just drafted."""
        raise NotImplementedError

    @torch.inference_mode()
    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        rows = self._batch.rows([text.request_id for text in texts])
        ends = np.array([len(text.token_ids) for text in texts], dtype=np.int64)
        drafts: dict[int, list[int]] = {row: [] for row in rows.tolist()}
        active = _Active(rows, ends, self._limits(rows))
        active = active.only(active.ends <= active.limits)
        chosen = self._first(active.rows, active.ends) if len(active.rows) else active.ends
        for place in range(1, most + 1):
            active, chosen = active.only(chosen >= 0), chosen[chosen >= 0]
            for row, token_id in zip(active.rows.tolist(), chosen.tolist(), strict=True):
                drafts[row].append(token_id)
            if place < most:
                active, chosen = self._extend(active, chosen)
        return [Draft(drafts[row]) if drafts[row] else NO_DRAFT for row in rows.tolist()]

    def _extend(self, active: _Active, chosen: Rows) -> tuple[_Active, Rows]:
        """Append drafts [R] where there is room; return the active rows and their next drafts."""
        has_room = active.ends < active.limits
        (rows, ends, limits), chosen = active.only(has_room), chosen[has_room]
        if len(rows):
            self._batch.token_ids[rows, ends] = chosen
            chosen = self._next(rows, ends + 1)
        return _Active(rows, ends + 1, limits), chosen

    def _limits(self, rows: Rows) -> Rows:
        """Return [R] the tokens of each row that may be computed, by slots and context length."""
        limits = np.full(len(rows), self._batch.max_model_len, dtype=np.int64)
        for table in self._batch.block_tables:
            limits = np.minimum(limits, table.capacity(rows))
        return limits

    def _sampled(self, compute_logits: Logits, hidden: Tensor, rows: Rows, columns: Rows) -> Rows:
        """Sample the tokens [R] at these columns of the rows from hidden states [R, H] before them."""
        samples, found = Samples(rows, columns), []
        for first in range(0, len(rows), self._slice_size):
            part = slice(first, first + self._slice_size)
            logits = compute_logits(hidden[part]).contiguous()
            found.append(self._sampler.sample_draft(logits, samples.part(part)))
        codes = self._transfers.download(found[0] if len(found) == 1 else torch.cat(found))
        self._transfers.mark().wait()
        chosen: Rows = codes.numpy()
        return chosen

    def _known_ids(self, rows: Rows, positions: Rows) -> Tensor:
        """Return [N] int64 the tokens at these positions, no drafts; in-flight steps may have sampled some."""
        tokens = self._batch.device_tokens
        if tokens is None:
            return self._host_ids(rows, positions)
        on_rows, at = self._upload(np.stack((rows, positions)))
        return tokens[on_rows, at].long()

    def _host_ids(self, rows: Rows, positions: Rows) -> Tensor:
        """Return [N] int64 the host's tokens, drafts included."""
        return self._upload(self._batch.token_ids[rows, positions].astype(np.int64))

    def _upload(self, numbers: Rows) -> Tensor:
        return self._transfers.upload(torch.from_numpy(numbers))


def layout_of(rows: Rows, starts: Rows, ends: Rows, num_prompt_tokens: Rows) -> StepLayout:
    """Return the layout of a step over tokens `starts` to `ends` [R] of each row, sampled after the last.

    Layouts after the prompt come in few sizes, so their steps are recorded.
    """
    num_tokens = ends - starts
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    num_tokens.cumsum(out=query_start_loc[1:])
    return StepLayout(
        rows,
        starts,
        ends,
        query_start_loc,
        num_samples=np.ones_like(rows),
        sampling=np.arange(len(rows)),
        logits_indices=query_start_loc[1:] - 1,
        pools=np.zeros(len(rows), dtype=np.bool_),
        catches_up=bool((starts + 1 >= num_prompt_tokens).all()),
    )


def last_of_each(hidden: Tensor, inputs: StepInputs) -> Tensor:
    """Return of hidden states [T, H] those of each request's last token, [R, H]."""
    return hidden.index_select(0, inputs.logits_indices)
