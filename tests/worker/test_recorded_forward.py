# SPDX-License-Identifier: Apache-2.0
"""Decode steps from recorded graphs: the tokens of the plain forward pass, whatever steps come between."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata, StateMetadata
from quire.kernels.cpu import library
from quire.kernels.cpu.recorded_graph import RecordedGraph
from quire.kernels.cpu.sized_graph import SizedGraph
from quire.layers.step import StepContext
from quire.worker import recorded_forward
from quire.worker.cpu import CpuDevice
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.recorded_forward import RecordedForward
from tests.fixtures.foreign_models import FOREIGN
from tests.fixtures.plain_models import PLAIN
from tests.fixtures.quick import mark_of, quick
from tests.fixtures.tiny_families import TINY_FAMILIES
from tests.worker.harness import tiny_config

FAMILIES = (
    "llama-tied-bias",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3-window-partial",
    "gemma2",
    "gemma3",
    "opt-post-norm",
    "gpt2",
    "apertus",
    "qwen2moe",
    "deepseekv3",
)
DTYPES = ("float32", "bfloat16", "float16")
ONE_OF_EACH = [*zip(FAMILIES, itertools.cycle(DTYPES), strict=False)]
UNRECORDED = {"nemotronh", "gemma4-experts"}
"""Experts without a gate, or whose activation no kernel has, are called one by one, as many as were chosen."""
OTHERS = sorted((TINY_FAMILIES.keys() | FOREIGN.keys() | PLAIN.keys()) - {*FAMILIES} - UNRECORDED)
ROOM = 1 << 12


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph | SizedGraph]:
    """The graphs that the test records."""
    graphs: list[RecordedGraph | SizedGraph] = []

    def noting(
        record: Callable[..., RecordedGraph | SizedGraph],
    ) -> Callable[..., RecordedGraph | SizedGraph]:
        def note(*args: Any) -> RecordedGraph | SizedGraph:
            graphs.append(record(*args))
            return graphs[-1]

        return note

    for name in ("record", "record_sized"):
        monkeypatch.setattr(recorded_forward, name, noting(getattr(recorded_forward, name)))
    return graphs


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *quick(itertools.product(FAMILIES, DTYPES), ONE_OF_EACH),
        *(pytest.param(name, "float32", marks=mark_of(name)) for name in OTHERS),
    ],
)
def test_every_family_gives_the_same_with_recorded_graphs(
    family: str,
    dtype: str,
    tiny_model: Callable[[str], Path],
    recorded: list[RecordedGraph | SizedGraph],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n, logprobs=2) for n in (5, 9, 14, 3, 20)]
    prompts = [[token + 3 for token in range(length)] for length in (2, 30, 7, 17, 5)]
    outputs = []
    for eager in (True, False):
        llm = LLM(
            str(tiny_model(family)),
            dtype=dtype,
            max_model_len=64,
            max_num_seqs=4,
            enforce_eager=eager,
            num_scheduler_steps=1,
        )
        assert len(recorded) == int(not eager), "what steps of many sizes play is there before the first"
        outputs.append([one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)])
        assert sum(isinstance(graph, SizedGraph) for graph in recorded) == int(not eager)
    assert "are not recorded" not in caplog.text, "the arena was too small"
    for plain, replayed in zip(*outputs, strict=True):
        assert (plain.token_ids, plain.logprobs) == (replayed.token_ids, replayed.logprobs)


def step(ids: list[int], starts: list[int], *, drafts: bool = False) -> StepInputs:
    """A step that only generates, if there are as many ids as starts; else the last request has the rest of them.

    These are drafts, or a prompt's.
    """
    count = len(starts)
    lengths = np.array([1] * (count - 1) + [len(ids) - count + 1])
    ends = np.array(starts) + lengths
    first = np.concatenate(([0], lengths.cumsum()))
    table = torch.arange(count * 4, dtype=torch.int32).view(-1, 4)[:, :3]
    positions = torch.tensor([*starts[:-1], *range(starts[-1], int(ends[-1]))])
    metadata = AttentionMetadata(
        torch.from_numpy(first).int(),
        torch.from_numpy(ends).int(),
        table,
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        slot_mapping=positions,
    )
    rows = np.arange(count)
    num_samples = lengths if drafts else np.ones_like(lengths)
    sampling = rows.repeat(num_samples)
    behind = np.arange(len(ids)) if drafts else first[1:] - 1
    layout = StepLayout(rows, ends - lengths, ends, first, num_samples, sampling, behind, rows < 0)
    return StepInputs(
        layout, torch.tensor(ids), positions, torch.from_numpy(behind), StepContext((metadata,))
    )


class Lookup:
    """A model of one kernel, which counts its passes: five find out what depends on a step's size."""

    def __init__(self) -> None:
        self.table = torch.arange(8.0)[:, None]
        self.passes = 0

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        self.passes += 1
        return ops.embedding(input_ids, self.table)

    def compute_logits(
        self, hidden: Tensor, adapter_rows: Tensor | None = None, num_added: int = 0
    ) -> Tensor:
        return hidden


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_python_runs_for_one_token_and_for_more_and_no_more() -> None:
    model = Lookup()
    forward = RecordedForward(model, 4, (4,), ROOM)
    for ids in ([1, 2], [3, 4], [6, 7, 5], [1, 2, 3, 4], [6, 7]):
        assert forward(step(ids, list(range(len(ids))))).flatten().tolist() == ids
    assert model.passes == 5
    for ids in ([5], [2], [3, 4], [7]):
        assert forward(step(ids, list(range(len(ids))))).flatten().tolist() == ids
    assert model.passes == 6
    for ids, starts in (([1, 2, 3], [0, 5]), ([3, 2, 1], [5]), ([3, 4], [0])):
        assert forward(step(ids, starts)).flatten().tolist() == ids
        assert forward(step(ids, starts, drafts=True)).flatten().tolist() == ids
    assert model.passes == 6
    for ids in ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]):
        assert forward(step(ids, [0, 5])).flatten().tolist() == ids
    assert model.passes == 8, "there are places for four tokens"


class Typed(Lookup):
    """A model that looks up the types of tokens."""

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return ops.embedding(input_ids if step.token_types is None else step.token_types, self.table)


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_token_types_are_part_of_a_recorded_graph() -> None:
    forward = RecordedForward(Typed(), 4, (4,), ROOM)
    for types, expected in ((None, 5), (torch.tensor([1]), 1), (torch.tensor([0]), 0), (None, 5)):
        plain = step([5], [0])
        assert forward(replace(plain, step=replace(plain.step, token_types=types))).item() == expected


class Reader(Lookup):
    """A model that reads rows beside tokens."""

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        assert step.intermediate is not None
        return super().forward(input_ids, positions, step) + step.intermediate["states"]


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_rows_that_are_handed_over_are_read_in_their_places() -> None:
    model = Reader()
    forward = RecordedForward(model, 4, (4,), ROOM)
    for ids in ([1, 2], [3, 4], [5], [6, 7], [2]):
        plain = step(ids, list(range(len(ids))))
        states = {"states": 10.0 * torch.tensor(ids)[:, None]}
        got = forward(replace(plain, step=replace(plain.step, intermediate=states)))
        assert got.flatten().tolist() == [11 * token_id for token_id in ids]
    assert model.passes == 6


class Described(Lookup):
    """A model of one kernel that reads the metadata of a group of states."""

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        own = step.metadata(1, StateMetadata)
        return ops.embedding(own.block_tables[:, 0].long() + own.kept, self.table)


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_recorded_graphs_have_places_for_groups_of_states() -> None:
    forward = RecordedForward(Described(), 4, (4, 4), ROOM)
    for first_blocks, starts, num_drafts in (([1, 2], [0, 4], None), ([3, 0], [2, 1], [0, 1])):
        plain = step([0, 0], starts)
        attention = plain.step.metadata(0, AttentionMetadata)
        tables = torch.tensor(first_blocks, dtype=torch.int32)[:, None].expand(-1, 3)
        kept = None if num_drafts is None else attention.seq_lens - torch.tensor(num_drafts).int()
        states = StateMetadata(attention.query_start_loc, attention.seq_lens, tables, 1, 5, 4, kept)
        result = forward(replace(plain, step=StepContext((attention, states))))
        expected = torch.tensor(first_blocks) + torch.tensor(starts) + 1 - torch.tensor(num_drafts or [0, 0])
        assert result.flatten().tolist() == expected.tolist()


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_recorded_step_with_a_bad_id_fails() -> None:
    forward = RecordedForward(Lookup(), 2, (4,), ROOM)
    forward(step([1], [0]))
    with pytest.raises(IndexError, match="embedding"):
        forward(step([8], [0]))
    assert forward(step([7], [0])).item() == 7


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_steps_that_are_too_large_for_the_arena_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model = Lookup()
    forward = RecordedForward(model, 40, (4,), arena_bytes=64)
    with caplog.at_level(logging.INFO):
        for size in (8, 40, 33, 10, 11, 10, 40):
            assert forward(step([3] * size, [0] * size)).flatten().tolist() == [3] * size
    assert "steps of over 20 tokens are not recorded" in caplog.text
    assert "steps of over 10 tokens are not recorded" in caplog.text
    assert model.passes == 1 + 1 + 5 + 4


class Uneven(Lookup):
    """A model that does something else where steps are large, or small."""

    def __init__(self, otherwise: Callable[[int], bool]) -> None:
        super().__init__()
        self.is_other = otherwise

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        found = super().forward(input_ids, positions, step)
        return found + found - found if self.is_other(len(input_ids)) else found


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize(
    ("otherwise", "problem"),
    [
        (lambda size: size > 3, "a small step's output is not the first rows of a large one's"),
        (lambda size: size == 2, "steps of different sizes make different calls"),
    ],
)
def test_steps_of_a_model_that_differs_by_size_run_as_they_are(
    otherwise: Callable[[int], bool], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    forward = RecordedForward(Uneven(otherwise), 8, (4,), ROOM)
    with caplog.at_level(logging.INFO):
        for size in (2, 5, 7, 1, 1, 2):
            assert forward(step([size] * size, [0] * size)).flatten().tolist() == [size] * size
    assert f"steps of over 1 tokens are not recorded: {problem}" in caplog.text


class Asking(Lookup):
    """A model that asks for a number of a tensor."""

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return super().forward(input_ids, positions, step) * (int(input_ids[0]) ** 0)


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_a_model_that_computes_otherwise_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Asking()
    forward = RecordedForward(model, 2, (4,), ROOM)
    with caplog.at_level(logging.INFO):
        assert forward(step([1, 4], [0, 0])).flatten().tolist() == [1, 4]
    assert "steps of over 1 tokens are not recorded: aten._local_scalar_dense" in caplog.text
    assert forward(step([4, 1], [0, 0])).flatten().tolist() == [4, 1]
    assert model.passes == 3


class Picking(Lookup):
    """A model that looks up, by torch, what a kernel has computed."""

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        found = super().forward(input_ids, positions, step)
        return self.table[1:].index_select(0, found.flatten().long() - 1)


class Cold(Lookup):
    """A model that fails at first."""

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        found = super().forward(input_ids, positions, step)
        if self.passes == 1:
            raise RuntimeError("too cold")
        return found


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize(("model", "problem"), [(Picking(), None), (Cold(), "too cold")])
def test_forward_failing_on_uncomputed_numbers_runs_unrecorded(
    model: Lookup, problem: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    forward = RecordedForward(model, 4, (4,), ROOM)
    with caplog.at_level(logging.INFO):
        for ids in ([1, 4], [4, 1, 3], [5]):
            assert forward(step(ids, [0] * len(ids))).flatten().tolist() == ids
    said = f"steps of over 1 tokens are not recorded: it fails where no kernel runs: {problem}"
    assert (said in caplog.text) is (problem is not None)
    assert caplog.text.count("not recorded") == (problem is not None)


class Choosing(Lookup):
    """A model that asks torch for something between kernels that no graph holds."""

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        return super().forward(input_ids[input_ids >= 0], positions, step)


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize(("model", "said"), [(Choosing(), True), (Lookup(), False)], ids=["index", "kernels"])
def test_unrecordable_model_is_reported_before_the_first_request(
    model: Lookup, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config, device = tiny_config(), CpuDevice()
    batch = InputBatch(2, 8, ())
    rehearsal = device.pipeline(model, batch, config, is_rehearsal=True)
    rehearsal.forward(step([1, 2, 3], [0, 5]))
    rehearsal.forward(step([1], [0]))
    device.pipeline(model, batch, config)
    message = "small steps are not recorded, so each takes Python's time as well: aten.index.Tensor runs"
    assert (message in caplog.text) is said
