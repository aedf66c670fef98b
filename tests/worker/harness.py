# SPDX-License-Identifier: Apache-2.0
"""Harness of the worker's tests: requests, a batch, an exact toy model, and a driver in place of the scheduler."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig, ModelArch
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import FullAttentionSpec, KVCacheConfig
from quire.layers.step import StepContext
from quire.sampling_params import SamplingParams
from quire.scheduler.output import (
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from quire.worker.cpu import CpuDevice
from quire.worker.devices import Device
from quire.worker.input_batch import BlockTable, InputBatch, Samples
from quire.worker.model_runner import LaunchedStep, ModelRunner

VOCAB_SIZE = 23
BLOCK_SIZE = 4
NUM_BLOCKS = 80
POISON = 22
"""After this token the toy model's logits are NaN."""


def request(
    prompt: Iterable[int],
    params: SamplingParams | None = None,
    *,
    request_id: str = "r",
    output: Iterable[int] = (),
    block_ids: list[int] | None = None,
    num_computed_tokens: int = 0,
    eos_token_ids: Iterable[int] = (),
) -> NewRequestData:
    prompt = list(prompt)
    return NewRequestData(
        request_id,
        [*prompt, *output],
        len(prompt),
        params or SamplingParams(temperature=0),
        [block_ids or []],
        num_computed_tokens,
        list(eos_token_ids),
    )


def input_batch(
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    block_size: int = BLOCK_SIZE,
    pool_size: int = NUM_BLOCKS,
    *,
    rolls_back: bool = True,
) -> InputBatch:
    table = BlockTable(max_num_seqs, max_model_len, FullAttentionSpec(block_size, 1, 1, 4), pool_size)
    return InputBatch(max_num_seqs, max_model_len, (table,), rolls_back=rolls_back)


def tiny_config(**args: Any) -> EngineConfig:
    """A prepared config of the toy model."""
    defaults = {
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": BLOCK_SIZE,
        "device": "cpu",
    }
    arch = ModelArch("Toy", "toy", VOCAB_SIZE, 1, 1, 1, 1, 1, 1, 64)
    return dataclasses.replace(EngineConfig.from_args(**defaults | args), model_arch=arch)


class ToyModel:
    """Next-token logits are a fixed random table's row, picked by a hash of all tokens so far.

    The hash is an integer sum read back through the block tables, so it is exact, and wrong if a token, position, slot
    or block is.
    """

    def __init__(self, poison: int = POISON) -> None:
        self.poison = poison
        num_planes = NUM_BLOCKS * FullAttentionSpec.planes  # block ids count them
        self.cache = torch.full((num_planes * BLOCK_SIZE,), torch.nan, dtype=torch.float64)
        self.table = torch.randn(997, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        metadata = step.metadata(0, AttentionMetadata)
        is_real = metadata.slot_mapping >= 0
        values = ((input_ids + 1) * (positions * positions + 7)).double()
        self.cache[metadata.slot_mapping[is_real]] = values[is_real]
        starts = metadata.query_start_loc.tolist()
        hidden = []
        for index, seq_len in enumerate(metadata.seq_lens.tolist()):
            num_blocks = -(-seq_len // BLOCK_SIZE)
            blocks = metadata.block_tables[index, :num_blocks].long()
            slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:seq_len]
            num_queries = starts[index + 1] - starts[index]
            if seq_len == 0:  # padding
                hidden.append(torch.zeros(num_queries, dtype=torch.float64))
                continue
            hidden.append(self.cache[slots].cumsum(0)[seq_len - num_queries :] % 997)
        hidden.append(torch.zeros(len(input_ids) - starts[-1], dtype=torch.float64))  # rows of no request
        state = torch.cat(hidden)
        return torch.stack((state, input_ids.double()), dim=1)

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        is_unknown = hidden.isnan().any(1)  # a slot was read that was never written, or rows are nobody's
        logits = self.table[hidden[:, 0].where(~is_unknown, 0.0).long()]
        logits[is_unknown | (hidden[:, 1] == self.poison), 3] = torch.nan
        return logits


def toy_runner(model: ToyModel | None = None, device: Device | None = None, **args: Any) -> ModelRunner:
    config = tiny_config(**{"enforce_eager": device is None} | args)
    specs = {"layer": FullAttentionSpec(BLOCK_SIZE, 1, 1, 4)}
    kv_config = KVCacheConfig(NUM_BLOCKS, group_layers(specs, 64), specs)
    return ModelRunner(model or ToyModel(), config, kv_config, device or CpuDevice())


@dataclasses.dataclass
class Sequence:
    """A request as the driver sees it."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    has_row: bool = False
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """Plays the scheduler: any number of tokens of any requests per step, blocks in random order."""

    def __init__(self, runner: ModelRunner, seed: int = 0, num_blocks: int = NUM_BLOCKS) -> None:
        self.runner = runner
        self.block_size = runner.batch.block_tables[0].block_size
        self.free_blocks = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.sequences: dict[str, Sequence] = {}
        self.removed: list[str] = []
        self.drafts: dict[str, list[int]] = {}
        """Put by a test behind the last token of its next step."""
        self.step_id = 0

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams) -> Sequence:
        self.sequences[request_id] = Sequence(list(prompt), len(prompt), params)
        return self.sequences[request_id]

    def preempt(self, request_id: str) -> None:
        """Take its blocks and row away; it starts again from its known tokens when scheduled next."""
        sequence = self.sequences[request_id]
        self.free_blocks = sequence.block_ids + self.free_blocks
        sequence.block_ids, sequence.num_computed_tokens = [], 0
        if sequence.has_row:
            self.removed.append(request_id)
        sequence.has_row = False

    def finish(self, request_id: str) -> Sequence:
        self.preempt(request_id)
        return self.sequences.pop(request_id)

    def step(self, num_scheduled_tokens: Mapping[str, int]) -> ModelRunnerOutput:
        output = self.runner.execute_model(self._plan(num_scheduled_tokens))
        for request_id, count in num_scheduled_tokens.items():
            self._take(request_id, count, output)
        return output

    def _plan(self, num_scheduled_tokens: Mapping[str, int]) -> SchedulerOutput:
        new, scheduled = [], []
        for request_id, count in num_scheduled_tokens.items():
            sequence, drafts = self.sequences[request_id], self.drafts.pop(request_id, [])
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
            blocks = self._grow(sequence, end + len(drafts))
            if not sequence.has_row:
                new.append(self._new(request_id, sequence))
            num_samples = 1 + len(drafts) if end == len(sequence.token_ids) else 0
            blocks = blocks if sequence.has_row else []
            scheduled.append(
                ScheduledRequest(request_id, start, count + len(drafts), num_samples, [blocks], drafts)
            )
            sequence.has_row = True
        plan = SchedulerOutput(self.step_id, new, scheduled, self.removed)
        self.removed, self.step_id = [], self.step_id + 1
        return plan

    def launch(self, num_scheduled_tokens: Mapping[str, int]) -> LaunchedStep:
        """A step whose result is not taken in; each request is taken to sample if it can."""
        step = self.runner.launch(self._plan(num_scheduled_tokens))
        for request_id, count in num_scheduled_tokens.items():
            sequence = self.sequences[request_id]
            sequence.num_computed_tokens += count
            if sequence.num_computed_tokens == len(sequence.token_ids):
                sequence.token_ids.append(-1)
        return step

    def generate(self, request_id: str, num_tokens: int, chunk: int = 1000) -> Sequence:
        """Run one request alone, `chunk` tokens a step, until it has that many output tokens."""
        sequence = self.sequences[request_id]
        while len(sequence.output) < num_tokens:
            pending = len(sequence.token_ids) - sequence.num_computed_tokens
            self.step({request_id: min(chunk, pending)})
        return sequence

    def _new(self, request_id: str, sequence: Sequence) -> NewRequestData:
        return NewRequestData(
            request_id,
            list(sequence.token_ids),
            sequence.num_prompt_tokens,
            sequence.params,
            [list(sequence.block_ids)],
            sequence.num_computed_tokens,
        )

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        missing = max(-(-num_tokens // self.block_size) - len(sequence.block_ids), 0)
        blocks = [self.free_blocks.pop() for _ in range(missing)]
        sequence.block_ids += blocks
        return blocks

    def _take(self, request_id: str, count: int, output: ModelRunnerOutput) -> None:
        sequence = self.sequences[request_id]
        sequence.num_computed_tokens += count
        samples = sequence.num_computed_tokens == len(sequence.token_ids) and request_id not in output.failed
        assert samples == (request_id in output.sampled_token_ids)
        sequence.token_ids += output.sampled_token_ids.get(request_id, [])
        if samples:  # accepted drafts are computed
            sequence.num_computed_tokens = len(sequence.token_ids) - 1
        sequence.logprobs += output.logprobs.get(request_id, [])
        sequence.prompt_logprobs += output.prompt_logprobs.get(request_id, [])


def append_tokens(batch: InputBatch, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
    """Sample for rows that have computed everything."""
    places = batch.places(next_samples(batch, rows))
    batch.advance(rows, batch.num_tokens[rows], np.ones(len(rows), dtype=np.bool_))
    batch.set_tokens(places, token_ids)


def next_samples(batch: InputBatch, rows: NDArray[np.int64]) -> Samples:
    """One for each row, behind its last token."""
    return Samples(rows, batch.num_tokens[rows])


def scheduled(batch: InputBatch, counts: Mapping[str, int]) -> list[ScheduledRequest]:
    """So many tokens of each request, of those that its row has; it samples behind its last one."""
    rows = {name: batch.row(name) for name in counts}
    starts = {name: int(batch.num_computed_tokens[row]) for name, row in rows.items()}
    return [
        ScheduledRequest(
            name, starts[name], count, int(starts[name] + count == batch.num_tokens[rows[name]]), []
        )
        for name, count in counts.items()
    ]


def rows_of(*rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(rows, dtype=np.int64)
