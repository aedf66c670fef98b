# SPDX-License-Identifier: Apache-2.0
"""Runs a model over a paged KV cache without the engine: shuffled blocks, sequences mixed and cut into chunks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels.attention_metadata import GroupMetadata
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import KVCacheConfig, RecurrentStateSpec, fit_states
from quire.layers.kv_cache import allocate_kv_cache, bind_kv_cache, kv_cache_specs
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.checkpoint import read_model_config
from quire.models.loader import load_model
from quire.models.registry import ModelRegistry
from quire.worker.input_batch import BlockTable
from quire.worker.inputs import group_metadata

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def prepared_config(model_dir: Path, **args: Any) -> EngineConfig:
    """An engine config as the model sees it: arch read, dtype settled."""
    args = {"dtype": "float32", "block_size": BLOCK_SIZE, "device": "cpu"} | args
    config = EngineConfig.from_args(model=str(model_dir), **args)
    impl = config.model.model_impl
    arch = read_model_config(model_dir, config.model.hf_overrides, impl)
    place = ModelRegistry.place_of(arch.architecture, impl)
    return dataclasses.replace(config, model_dir=str(model_dir), model_arch=arch, model_class=place)


def load_tiny(model_dir: Path, **args: Any) -> CausalLM:
    """The model of a checkpoint directory."""
    return load_model(prepared_config(model_dir, **args))


@torch.inference_mode()
def logits_of(
    model: CausalLM,
    sequences: Sequence[Sequence[int]],
    *,
    chunk_sizes: Sequence[int],
    device: torch.device = CPU,
    inputs: Callable[[Tensor], Tensor] = lambda ids: ids,
    positions: Callable[[Tensor], Tensor] = lambda positions: positions,
    adapters: Sequence[int] | None = None,
) -> list[Tensor]:
    """float32 logits [len, V] of every position of each sequence.

    All sequences run together; in each step, each takes the next of `chunk_sizes` (round and round) of its tokens.
    `inputs` and `positions` make of ids and positions [T] what the model gets; `adapters` are those of the sequences.
    """
    tables = _shuffled_tables(model, sequences, device)
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for step in _steps(sequences, chunk_sizes):
        members = [index for index, (start, end) in enumerate(step) if end > start]
        token_ids = [sequences[i][position] for i in members for position in range(*step[i])]
        places = [position for i in members for position in range(*step[i])]
        with device:
            groups = tuple(_metadata(table, members, step) for table in tables)
            rows_of = [adapters[i] for i in members for _ in range(*step[i])] if adapters else None
            context = StepContext(groups, None if rows_of is None else torch.tensor(rows_of).int())
            hidden = model(inputs(torch.tensor(token_ids)), positions(torch.tensor(places)), context)
        logits = model.compute_logits(hidden, context.adapter_rows)
        assert logits.dtype == torch.float32
        for i, part in zip(members, logits.split([step[i][1] - step[i][0] for i in members]), strict=True):
            rows[i].append(part)
    return [torch.cat(parts) for parts in rows]


def _shuffled_tables(
    model: CausalLM, sequences: Sequence[Sequence[int]], device: torch.device
) -> list[BlockTable]:
    """Give each sequence its blocks, and the model a cache full of NaN, so that reading too much shows."""
    specs = fit_states(kv_cache_specs(model))
    has_states = any(isinstance(spec, RecurrentStateSpec) for spec in specs.values())
    groups = group_layers(specs, BLOCK_SIZE, hybrid=has_states)
    needed = [[group.spec.num_blocks(len(sequence)) for sequence in sequences] for group in groups]
    blocks = list(range(1, sum(map(sum, needed)) + 1))
    random.Random(0).shuffle(blocks)
    kv_config = KVCacheConfig(len(blocks) + 1, groups, specs)
    tensors = allocate_kv_cache(kv_config, device)
    for tensor in tensors:
        tensor.fill_(255)  # all bits set are a NaN in every float type
    bind_kv_cache(model, kv_config, tensors)
    tables, longest = [], max(map(len, sequences))
    for group, counts in zip(groups, needed, strict=True):
        parts = kv_config.parts_per_block(group)
        tables.append(BlockTable(len(sequences), longest, group.spec, kv_config.num_blocks, parts))
        for row, count in enumerate(counts):
            tables[-1].append(row, [blocks.pop() for _ in range(count)], 0)
    return tables


def _steps(sequences: Sequence[Sequence[int]], chunk_sizes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Per step, each sequence's range of positions."""
    done = [0] * len(sequences)
    turn = 0
    while any(start < len(sequence) for start, sequence in zip(done, sequences, strict=True)):
        step = []
        for index, sequence in enumerate(sequences):
            size = chunk_sizes[(turn + index) % len(chunk_sizes)]
            step.append((done[index], min(done[index] + size, len(sequence))))
        done = [end for _, end in step]
        turn += 1
        yield step


def _metadata(table: BlockTable, members: list[int], step: list[tuple[int, int]]) -> GroupMetadata:
    """A group's metadata of a step that computes, of each of `members`, the tokens of a range of positions."""
    rows, lengths = np.array(members), np.array([step[i][1] - step[i][0] for i in members])
    ends = torch.tensor([step[i][1] for i in members], dtype=torch.int32)
    positions = np.concatenate([np.arange(*step[i]) for i in members])
    longest = int(ends.max())
    return group_metadata(
        table,
        query_start_loc=torch.tensor([0, *lengths.cumsum()], dtype=torch.int32),
        seq_lens=ends,
        block_tables=torch.tensor(table.gather(rows, longest)),
        slots=torch.tensor(table.slots(rows.repeat(lengths), positions)),
        max_query_len=int(lengths.max()),
        max_seq_len=longest,
    )
