# SPDX-License-Identifier: Apache-2.0
"""Multi-step decode: further tokens of generating requests, without a plan between them.

Between two steps a plan is made, packed and reported on. That is a fifth of a millisecond of Python, but takes seven
times as long in caches just flushed by a model's weights: a tenth of a small model's token. So a recorded graph holds a
whole round: forward pass, head and sampling. Between two rounds a few numbers are written.

Invariant: a round has the kernels of a step, in their order, so its tokens are those of steps. Work that a round cannot
do is left to the next step, which ends the request or reports its failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.cpu.sampling import UnusableLogitsError, require_usable, sample_by_inversion, uniforms_at
from quire.layers.step import StepContext
from quire.scheduler.output import NewRequestData
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.inputs import StepInputs
from quire.worker.pipeline import LanguageModel
from quire.worker.recorded_forward import RecordedForward
from quire.worker.sampler import Sampler

Tokens = NDArray[np.int64]


class RoundOfModel:
    """Model body to record: ids and positions [R] -> next tokens [R], negative for none.

    Raises:
        UnusableLogitsError: some logits are not finite.
    """

    def __init__(self, model: LanguageModel, most: int) -> None:
        self._model = model
        self._settings = torch.zeros(most, 4, dtype=torch.float64)
        self._seeds = torch.zeros(most, dtype=torch.int64)
        self._positions = torch.zeros(most, dtype=torch.int64)
        self._place_of_draw = self._positions.numpy()

    def use(self, settings: NDArray[np.float64], keys: Tokens) -> None:
        """Set the sampling settings of the rows [R], and their seeds and positions [R, 2]."""
        count = len(settings)
        self._settings.numpy()[:count] = settings
        self._seeds.numpy()[:count], self._place_of_draw[:count] = keys.T

    def go_on(self, count: int) -> None:
        """Advance the sampling position of the first `count` rows."""
        self._place_of_draw[:count] += 1

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        count = inputs.shape[0]
        logits = self._model.compute_logits(self._model.forward(inputs, positions, step)).contiguous()
        require_usable(logits)
        numbers = uniforms_at(self._seeds[:count], self._positions[:count])
        return sample_by_inversion(logits, self._settings[:count], numbers)


class StopTokens:
    """Stop token ids of each row."""

    def __init__(self, max_num_seqs: int) -> None:
        self._ids = np.full((max_num_seqs, 1), -1, dtype=np.int64)

    def add_request(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        ids = [*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)]
        if len(ids) > self._ids.shape[1]:
            missing = ((0, 0), (0, len(ids) - self._ids.shape[1]))
            self._ids = np.pad(self._ids, missing, constant_values=-1)
        self._ids[row] = -1
        self._ids[row, : len(ids)] = ids

    def of(self, rows: NDArray[np.int64]) -> Tokens:
        """Return the ids [R, any number] of rows [R]; negative ones are padding."""
        ids: Tokens = self._ids[rows]
        return ids


class RecordedMultiStepDecode:
    """Recorded rounds after a step of one token of each request.

    Args:
        model: loaded, its KV cache bound.
        batch: source of the rows; their tables have blocks for all tokens that the plan allows.
        most: rows of a step with further rounds.
        arena_bytes: memory for the tensors of a round.
        max_s: seconds for a step with its further rounds, which are expected to take equally long.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch: InputBatch,
        most: int,
        arena_bytes: int,
        max_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batch = batch
        self._most = most
        self._max_s = max_s
        self._clock = clock
        self._round = RoundOfModel(model, most)
        widths = tuple(table.block_ids.shape[1] for table in batch.block_tables)
        self._forward = RecordedForward(self._round, most, widths, arena_bytes)
        self._stops = StopTokens(batch.max_num_seqs)

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Add a request with its row."""
        self._stops.add_request(row, request)

    def remove_request(self, row: int) -> None:
        """Do nothing: the next request of the row overwrites the stop tokens."""

    def record(self, inputs: StepInputs) -> None:
        """Record rounds of several requests, unless they are recorded; nothing is computed."""
        self._forward.record(inputs)

    def more(
        self, inputs: StepInputs, token_ids: Tokens, sampler: Sampler, num_rounds: int, took_s: float
    ) -> list[Tokens]:
        """Return the tokens [R] of each of at most `num_rounds` further rounds.

        There are fewer if time is up, a request may have ended, or a round cannot run.

        Args:
            token_ids: sampled by the step [R].
            took_s: seconds that the step took.
        """
        began = self._clock() - took_s
        if not self._has_time(took_s, 1) or not self._can_go_on(inputs, token_ids, sampler):
            return []
        # Python is slow between two rounds, so all possible work is done before.
        slots = self._begin(inputs, sampler, num_rounds)
        play, stops = self._forward.player(inputs), self._stops.of(inputs.layout.rows)
        found = list[Tokens]()
        while len(found) < num_rounds and not (stops == token_ids[:, None]).any():
            if not self._has_time(self._clock() - began, 1 + len(found)):
                break
            self._forward.places.go_on(token_ids, [of_group[len(found)] for of_group in slots])
            try:
                token_ids = play().numpy().copy()
            except UnusableLogitsError:
                break
            if token_ids.min() < 0:
                break
            self._round.go_on(len(token_ids))
            found.append(token_ids)
        return found

    def _can_go_on(self, inputs: StepInputs, token_ids: Tokens, sampler: Sampler) -> bool:
        """Return whether rounds support all that these requests ask for."""
        step, rows, layout = inputs.step, inputs.layout.rows, inputs.layout
        is_plain = step.adapter_rows is None and step.token_types is None
        generates = layout.is_all_sampled and layout.is_one_token_each
        if (
            not (is_plain and generates)
            or len(rows) > self._most
            or token_ids.min() < 0
            or not sampler.only_draws(rows)
        ):
            return False
        self._forward.record(inputs)
        return self._forward.takes(inputs)

    def _begin(self, inputs: StepInputs, sampler: Sampler, num_rounds: int) -> list[Tokens]:
        """Set the inputs that all rounds share; return the slots of their tokens, [rounds, R] of each group."""
        rows, ends, tables = inputs.layout.rows, inputs.layout.ends, self._batch.block_tables
        self._round.use(*sampler.draws(Samples(rows, ends + 1)))
        self._forward.places.fill(inputs)
        last = int(ends.max()) + num_rounds
        self._forward.places.widen([table.gather(rows, last) for table in tables])
        positions = ends + np.arange(num_rounds)[:, None]
        return [table.slots(rows, positions) for table in tables]

    def _has_time(self, took_s: float, num_rounds: int) -> bool:
        """Return whether another round, as long as each of those before, ends in time."""
        return took_s * (num_rounds + 1) <= self._max_s * num_rounds
