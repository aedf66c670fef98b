# SPDX-License-Identifier: Apache-2.0
"""Sampling of a step: hidden states -> logits -> tokens, and logprobs of prompt tokens.

- `FirstTokens`: top tokens of a vocabulary sharded over ranks, without gathering all logits
- `RowLogits`: logits of rows, whose width depends on the row's own adapter only
- `SampleGraphs`: captured output head and sampler
- `Samplers`: one sampler per width of logits
- `RowSampling`: samples by logits; `stage_pipeline` has the counterpart that receives tokens
- `PromptLogprobs`: logprobs of the prompt's own tokens
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.distributed.group import Group
from quire.errors import EngineError
from quire.kernels import ops
from quire.models.base import CausalLM
from quire.scheduler.output import NewRequestData, TokenLogprobs
from quire.worker.graphs import GraphMemory, Graphs, RowBuffer, row_variant, sample_sizes
from quire.worker.input_batch import InputBatch, Samples
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.pipeline import LanguageModel
from quire.worker.sampler import Sampled, Sampler, SamplerOutput, clear_unusable
from quire.worker.sampler.logprobs import LogprobsMode, RawLogprobs, token_logprobs
from quire.worker.sampler.sampler import (
    NON_FINITE_CODE,
    NOTHING_STAGED,
    SampleKind,
    SettingsBuffer,
    StagedRows,
)
from quire.worker.transfers import Transfers, moved

_LEAST_GAIN = (
    8  # minimal ratio of a rank's logits to those exchanged: each travels with its id, in twice the bytes
)


class FirstTokens:
    """Top tokens of an output head that is sharded over ranks, all shards but perhaps the last of equal size.

    Each rank finds the top tokens of its shard, and only their logits and ids are exchanged. The order is that of
    `ops.sample_tokens`: highest logit first, of equal ones the lowest token. The global top k are among the top k of
    the ranks.

    Shapes: N rows, H hidden size, V tokens, R ranks, S tokens of a rank, k tokens exchanged per rank.
    """

    def __init__(self, model: CausalLM, group: Group, first_token: int, share: int, vocab_size: int) -> None:
        self._model, self._group, self._first_token = model, group, first_token
        self._share, self._vocab_size = share, vocab_size

    @staticmethod
    def from_model(model: object) -> FirstTokens | None:
        """Return None if the model has all logits itself or computes them in its own way."""
        shared = model.shared_head() if isinstance(model, CausalLM) else None
        if shared is None or shared.group is None:
            return None
        assert isinstance(model, CausalLM)
        return FirstTokens(model, shared.group, shared.rows[0].start, shared.share, shared.shape[0])

    def codes(self, hidden: Tensor) -> Tensor:
        """Map hidden [N, H] to [N] int64, equal on all ranks: a token, or the code of `Sampled` for unusable logits."""
        values, tokens = self._model.own_logits(hidden).max(1)
        best, found = self._of_ranks(values[:, None], tokens[:, None])
        best, rank = best.max(1)
        return found.gather(1, rank[:, None])[:, 0].masked_fill(~best.isfinite(), NON_FINITE_CODE)

    def are_few(self, num: int) -> bool:
        """Return whether exchanging `num` tokens of each rank is cheaper than all logits."""
        return _LEAST_GAIN * num <= self._share

    def logits(self, hidden: Tensor, num: int) -> Tensor:
        """Map hidden [N, H] to float32 [N, V], equal on all ranks: the `num` top tokens of each rank, -inf elsewhere.

        A row of logits from which no token can be sampled remains one.
        """
        values, tokens = self._of_ranks(*_first(self._model.own_logits(hidden), num))
        return values.new_full((len(hidden), self._vocab_size), -torch.inf).scatter_(1, tokens, values)

    def _of_ranks(self, values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather float32 and int64 [N, k], tokens counted from the rank's first, to [N, R * k]."""
        tokens = (tokens + self._first_token).int()
        shown = torch.stack((values, tokens.view(torch.float32)), 2).flatten(1)
        every = ops.all_gather(shown, self._group).view(len(values), -1, 2)
        return every[:, :, 0], every[:, :, 1].contiguous().view(torch.int32).long()


def _first(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return values and indices [N, num] of the top tokens of each row [N, S], in the order of `ops.sample_tokens`.

    If S is smaller than `num`, the top token is repeated.
    """
    most = min(num, logits.shape[1])
    values, places = (_top_checked if logits.device.type == "cpu" else by_keys)(logits, most)
    missing = num - most
    if missing:
        values = torch.cat((values, values[:, :1].expand(-1, missing)), 1)
        places = torch.cat((places, places[:, :1].expand(-1, missing)), 1)
    return values, places


def _top_checked(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the top tokens on a host: check for ties at the boundary, and sort if there are any."""
    values, places = logits.topk(min(most + 1, logits.shape[1]))
    last, next_one = values[:, most - 1], values[:, -1]
    if values.shape[1] > most and ((last == next_one) & (last > -torch.inf)).any():
        # `topk` breaks ties arbitrarily.
        values, places = logits.sort(dim=1, descending=True, stable=True)
    return values[:, :most], places[:, :most]


def by_keys(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the top tokens without synchronizing with the device, by distinct integer keys.

    The high bits of a key are the logit's bits in sortable order, the low bits its reversed index.
    """
    count = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(logits.isnan(), 0x7FFFFFFF).long()
    keys = (order << 32) | torch.arange(count - 1, -1, -1, device=logits.device)
    places = keys.topk(most).indices
    return logits.gather(1, places), places


_NONE: NDArray[np.int64] = np.zeros(1, dtype=np.int64)


class RowLogits:
    """Logits of rows, of the model's tokens and of those added by each row's adapter.

    Invariant: the width of a row's logits depends on its own adapter, whatever its neighbours; the order of a sum over
    a row, and so its bits, depends on the width.

    Args:
        vocab_size: V, tokens of the model.
        max_added: A, most tokens that an adapter may add.

    Attributes:
        first: finds the top tokens of a vocabulary sharded over ranks; None: all logits must be computed.
    """

    def __init__(
        self, model: LanguageModel, batch: InputBatch, vocab_size: int, max_added: int, transfers: Transfers
    ) -> None:
        self._model = model
        self._batch = batch
        self._vocab_size = vocab_size
        self._max_added = max_added
        self._transfers = transfers
        self.first = FirstTokens.from_model(model)

    def widths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [N] the number of logits of each row [N]: V or V + A."""
        return self._vocab_size + self._max_added * (self._num_added(rows) > 0)

    def num_tokens(self, row: int) -> int:
        """Return the number of tokens that a row may sample."""
        return self._vocab_size + int(self._num_added(np.array([row]))[0])

    def of(self, hidden: Tensor, adapter_rows: Tensor | None, rows: NDArray[np.int64]) -> Tensor:
        """Map hidden [N, H], and the adapter of each [N], to float32 logits, for rows [N] of one width.

        Without adapters the model gets hidden states alone, because some models accept nothing else.

        Raises:
            EngineError: the model returned another number of logits, an internal bug.
        """
        added = self._max_added if self._num_added(rows[:1]).any() else 0
        logits = self._computed(hidden, adapter_rows, added)
        if added:
            self._mask_foreign_tokens(logits, rows)
        return logits

    def of_model(self, hidden: Tensor, adapter_rows: Tensor | None) -> Tensor:
        """Compute the logits of rows without added tokens; see `of`."""
        return self._computed(hidden, adapter_rows, 0)

    def are_of_model(self, rows: NDArray[np.int64]) -> bool:
        """Return whether none of the rows [N] has added tokens."""
        return not self._widths_vary or not self._num_added(rows).any()

    def _computed(self, hidden: Tensor, adapter_rows: Tensor | None, added: int) -> Tensor:
        adapted = () if adapter_rows is None else (adapter_rows, added)
        logits = self._model.compute_logits(hidden, *adapted).contiguous()
        if logits.shape[1] != self._vocab_size + added:
            raise EngineError(
                f"the model returned {logits.shape[1]} logits for {self._vocab_size + added} tokens"
            )
        return logits

    def runs(self, rows: NDArray[np.int64], most: int) -> Iterator[slice]:
        """Yield slices of adjacent rows [N] that have one width, at most `most` rows each."""
        changes = (np.diff(self.widths(rows)).nonzero()[0] + 1).tolist() if self._widths_vary else []
        for start, end in pairwise([0, *changes, len(rows)]):
            yield from (slice(i, min(i + most, end)) for i in range(start, end, most))

    @property
    def _widths_vary(self) -> bool:
        """True if rows may have added tokens."""
        return self._batch.adapters is not None and self._batch.adapters.add_tokens

    def _num_added(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        adapters = self._batch.adapters
        return _NONE if adapters is None else adapters.num_added(rows)

    def _mask_foreign_tokens(self, logits: Tensor, rows: NDArray[np.int64]) -> None:
        """Set added tokens that are not of the row's own adapter to -inf."""
        ends = self._transfers.upload(torch.from_numpy(self._vocab_size + self._num_added(rows)))
        ids = torch.arange(logits.shape[1], device=logits.device)
        logits.masked_fill_(ids >= ends[:, None], -torch.inf)


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
        self._graphs = Graphs[_SampleKey](
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


class Samplers:
    """Samplers by width of logits, made when the first row of a width is added; a row's width never changes.

    Args:
        make: makes the sampler for a width of logits.

    Attributes:
        plain: sampler of rows without added tokens.
    """

    def __init__(self, make: Callable[[int], Sampler], logits: RowLogits, vocab_size: int) -> None:
        self._make = make
        self._logits = logits
        self.plain = make(vocab_size)
        self._of_width = {vocab_size: self.plain}
        self._of_row: dict[int, Sampler] = {}

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Add a request that was given a row."""
        width = int(self._logits.widths(np.array([row]))[0])
        if width not in self._of_width:
            self._of_width[width] = self._make(width)
        self._of_row[row] = self._of_width[width]
        self._of_row[row].add_request(row, request)

    def remove_request(self, row: int) -> None:
        self._of_row.pop(row).remove_request(row)

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """See `Sampler.reads_tokens`."""
        return any(sampler.reads_tokens(rows) for sampler in self._of_width.values())

    @property
    def replay(self) -> bool:
        """See `Sampler.replays`."""
        return any(sampler.replays for sampler in self._of_width.values())

    def of_row(self, row: int) -> Sampler:
        """Return the sampler of a row."""
        return self._of_row[row]

    def of(self, rows: NDArray[np.int64]) -> Sampler:
        """Return the sampler of at least one row, all of one width."""
        return self._of_width[int(self._logits.widths(rows[:1])[0])]


class SampledPart(Protocol):
    """Part of the samples of a step."""

    @property
    def codes(self) -> Tensor:
        """Token ids or failure codes; see `Sampled`."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> SampledPart:
        """Return a copy with its tensors moved, as by `Transfers.download`."""

    def read(self) -> SamplerOutput:
        """Return the output; the tensors must have arrived on the host."""


class Sampling(Protocol):
    """Source of the sampled tokens of a step."""

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the state of a request that was given a row."""

    def remove_request(self, row: int) -> None:
        """Drop the state of a row."""

    def reads_tokens(self, inputs: StepInputs) -> bool:
        """Return whether `sample` needs earlier sampled tokens on the host."""

    @property
    def replays(self) -> bool:
        """True if `sample` may read hidden states of tokens that are not sampled anew."""

    def sample(self, inputs: StepInputs, hidden: Tensor) -> Sequence[SampledPart]:
        """Return all samples of a step, in order."""


class RowSampling:
    """Sampling by logits of the rows.

    Args:
        slice_size: most rows of logits that exist at once.
        graphs: captured sampling, used where a graph fits.
    """

    def __init__(
        self,
        logits: RowLogits,
        samplers: Samplers,
        slice_size: int,
        transfers: Transfers,
        graphs: SampleGraphs | None = None,
    ) -> None:
        self._logits = logits
        self._samplers = samplers
        self._slice_size = slice_size
        self._transfers = transfers
        self._graphs = graphs

    def add_request(self, row: int, request: NewRequestData) -> None:
        self._samplers.add_request(row, request)

    def remove_request(self, row: int) -> None:
        self._samplers.remove_request(row)

    def reads_tokens(self, inputs: StepInputs) -> bool:
        return self._samplers.reads_tokens(inputs.layout.samples.rows)

    @property
    def replays(self) -> bool:
        return self._samplers.replay

    def sample(self, inputs: StepInputs, hidden: Tensor) -> Sequence[Sampled]:
        if self.replays:
            self._replay(inputs, hidden)
        samples = inputs.layout.samples
        runs = [*self._logits.runs(samples.rows, self._slice_size)]
        # With several parts, the next one would overwrite the hidden states that a graph reads.
        graphs = self._graphs if len(runs) == 1 and self._logits.are_of_model(samples.rows) else None
        return [self._sample_part(inputs, hidden, samples.part(part), part, graphs) for part in runs]

    def _replay(self, inputs: StepInputs, hidden: Tensor) -> None:
        """Sample again what preempted requests had sampled before, as far as this step computes it."""
        layout, adapter_rows = inputs.layout, inputs.step.adapter_rows
        for index, row in enumerate(layout.rows.tolist()):
            sampler, start = self._samplers.of_row(row), int(layout.starts[index])
            columns = sampler.columns_to_replay(row, start, int(layout.ends[index]))
            offset = (
                int(layout.query_start_loc[index]) - start - 1
            )  # plus the column: index of its hidden state
            for first in columns[:: self._slice_size]:
                end = min(first + self._slice_size, columns.stop)
                part = slice(offset + first, offset + end)
                adapters = None if adapter_rows is None else adapter_rows[part]
                logits = self._logits.of(hidden[part], adapters, np.full(end - first, row))
                for place, column in enumerate(range(first, end)):
                    sampler.replay(logits[place : place + 1], row, column)

    def _sample_part(
        self, inputs: StepInputs, hidden: Tensor, samples: Samples, part: slice, graphs: SampleGraphs | None
    ) -> Sampled:
        adapter_rows = inputs.step.adapter_rows
        adapters = None if adapter_rows is None else _of_samples(inputs, adapter_rows, part)
        of_samples, sampler = _of_samples(inputs, hidden, part), self._samplers.of(samples.rows)
        staged = sampler.stage_on_host(samples)
        first = self._logits.first if adapters is None else None
        if first is not None and staged.is_plain_greedy:
            return Sampled.of_codes(first.codes(of_samples))
        sampled = None if graphs is None else graphs.sample(staged, of_samples, adapters)
        if sampled is not None:
            return sampled
        num = None if first is None else staged.num_deciding()
        if first is not None and num is not None and first.are_few(num):
            logits = first.logits(of_samples, num)
        else:
            logits = self._logits.of(of_samples, adapters, samples.rows)
        return sampler.sample(logits, staged.moved(self._transfers.upload))


def _of_samples(inputs: StepInputs, of_tokens: Tensor, part: slice) -> Tensor:
    """Return of a per-token tensor the rows of some samples."""
    layout = inputs.layout
    if layout.is_all_sampled:  # no gather needed
        return of_tokens[: layout.num_tokens][part]
    return of_tokens.index_select(0, inputs.logits_indices[part])


class _Slice(NamedTuple):
    """Logprobs of some prompt positions, on their way to the host."""

    is_bad: Tensor
    """[M] bool: non-finite logits."""
    logprobs: RawLogprobs


class PromptEntries(NamedTuple):
    """Prompt logprobs of one request in one step."""

    request: int
    """Index of the request in the step."""
    slices: list[_Slice]

    def read(self) -> list[TokenLogprobs] | None:
        """Return the entries, once they are on the host; None: some logits are non-finite.

        Entry i of a chunk that starts at position c is about prompt token c + i + 1. The prompt's last position
        predicts no prompt token and has no entry.
        """
        if any(part.is_bad.any() for part in self.slices):
            return None
        return [entry for part in self.slices for entry in part.logprobs.entries()]


class PromptLogprobs:
    """Logprobs of prompt tokens, for the rows that request them.

    Invariant: an entry depends only on the hidden state at its position, so a chunked prompt gives the same entries.
    Logits are made a slice of positions at a time, so memory does not grow with the prompt.

    Args:
        logits: makes logits of hidden states.
        slice_size: most positions whose logits exist at once.
        mode: logprobs or logits; nothing is sampled here, so raw and processed are the same.
    """

    def __init__(
        self,
        batch: InputBatch,
        logits: RowLogits,
        slice_size: int,
        transfers: Transfers,
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self._mode = mode
        self._batch = batch
        self._logits = logits
        self._slice_size = slice_size
        self._transfers = transfers
        self._num_logprobs: dict[int, int] = {}

    @property
    def are_wanted(self) -> bool:
        """True if any row requests prompt logprobs."""
        return bool(self._num_logprobs)

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Store the request's setting."""
        if request.sampling_params.prompt_logprobs is not None:
            self._num_logprobs[row] = request.sampling_params.prompt_logprobs

    def remove_request(self, row: int) -> None:
        self._num_logprobs.pop(row, None)

    def compute(
        self, layout: StepLayout, hidden: Tensor, adapter_rows: Tensor | None = None
    ) -> list[PromptEntries]:
        """Start the download of the entries for this step's prompt positions.

        adapter_rows [T]: see `StepContext`.
        """
        if not self._num_logprobs:
            return []
        return [
            PromptEntries(
                index,
                [
                    self._slice(
                        self._logits_of(hidden, adapter_rows, part, row), some, self._num_logprobs[row]
                    )
                    for part, some in self._parts(hidden_rows.start, targets)
                ],
            )
            for index, row, hidden_rows, targets in self._chunks(layout)
        ]

    def _chunks(self, layout: StepLayout) -> Iterator[tuple[int, int, slice, NDArray[np.int64]]]:
        """Yield index, row, slice of `hidden` and target tokens for each request with prompt logprobs in this step."""
        for index, row in enumerate(layout.rows.tolist()):
            if row not in self._num_logprobs:
                continue
            first, offset = int(layout.starts[index]), int(layout.query_start_loc[index])
            length = int(layout.query_start_loc[index + 1]) - offset
            length = min(length, int(self._batch.num_prompt_tokens[row]) - 1 - first)
            if length > 0:
                targets = self._batch.token_ids[row, first + 1 : first + 1 + length].astype(np.int64)
                yield index, row, slice(offset, offset + length), targets

    def _parts(self, first: int, targets: NDArray[np.int64]) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of hidden states, from `first` on, whose logits may exist at once, with their target tokens."""
        for start in range(0, len(targets), self._slice_size):
            some = targets[start : start + self._slice_size]
            yield slice(first + start, first + start + len(some)), torch.from_numpy(some)

    def _logits_of(self, hidden: Tensor, adapter_rows: Tensor | None, part: slice, row: int) -> Tensor:
        adapters = None if adapter_rows is None else adapter_rows[part]
        return self._logits.of(hidden[part], adapters, np.full(part.stop - part.start, row))

    def _slice(self, logits: Tensor, targets: Tensor, num_logprobs: int) -> _Slice:
        download = self._transfers.download
        is_bad = clear_unusable(logits)
        targets, counts = self._transfers.upload(targets), [num_logprobs] * len(logits)
        logprobs = token_logprobs(logits, targets, counts, self._mode)
        return _Slice(download(is_bad), moved(logprobs, download))
