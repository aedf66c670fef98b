# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a vocabulary find its likeliest token as one that has all logits does, and show little."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.kernels import ops
from quire.kernels.attention_metadata import ANY_LIMITS, NO_LIMITS
from quire.kernels.cpu import library
from quire.layers.embedding import VocabEmbedding
from quire.layers.shard import Shard, ShardSpan
from quire.models.base import CausalLM
from quire.sampling_params import SamplingParams
from quire.worker.first_tokens import FirstTokens, by_keys
from quire.worker.sampler.logprobs import StagedLogprobs
from quire.worker.sampler.sampler import NON_FINITE_CODE, StagedDraw, StagedRows, clear_unusable
from tests.distributed.test_group import on_all
from tests.executor.test_multiproc import run, said, started
from tests.fixtures.folded import folded
from tests.fixtures.thread_ranks import InProcess, ThreadRanks
from tests.models.harness import load_tiny
from tests.models.test_tensor_parallel import together

INF, NAN = float("inf"), float("nan")
needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())


def wanted(logits: Tensor) -> list[int]:
    logits = logits.clone()
    is_bad = clear_unusable(logits)
    greedy = torch.tensor([[0.0, -INF, logits.shape[1], 1.0]], dtype=torch.float64).repeat(len(logits), 1)
    return ops.sample_tokens(logits, greedy, None, NO_LIMITS).masked_fill(is_bad, NON_FINITE_CODE).tolist()


def rows() -> Tensor:
    """Random ones, of few different numbers, and what no token can be chosen from."""
    random = torch.Generator().manual_seed(3)
    ties = torch.randint(-1, 2, (40, 11), generator=random).float()
    plain = torch.randn(20, 11, generator=random)
    odd = torch.zeros(6, 11)
    odd[0, 7], odd[1, 2], odd[2], odd[3, :6], odd[4, 0], odd[5] = NAN, INF, -INF, -INF, -INF, -0.0
    odd[5, 4] = 0.0
    return torch.cat((ties, plain, odd))


def first_tokens(model: Any, group: Group, own: slice) -> FirstTokens:
    num_tokens = rows().shape[1]
    return FirstTokens(cast("CausalLM", model), group, own.start, -(-num_tokens // group.size), num_tokens)


@folded("num", [1, 2, 3, 5, 11])
@folded("size", [2, 3, 4])
def test_top_k_samples_of_ranks_are_those_of_all_logits(size: int, num: int) -> None:
    """With top-p and min-p beside it, and for greedy rows as well; of what cannot be drawn from, too."""
    logits, draw = rows(), np.random.default_rng(num)
    settings = torch.tensor(
        [[draw.choice([0.0, 0.7, 2.0]), draw.choice([-INF, -2.0]), draw.integers(1, num + 1), draw.choice([1.0, 0.6])]
         for _ in logits], dtype=torch.float64,
    )  # fmt: skip
    keys = torch.from_numpy(draw.integers(0, 1 << 40, (len(logits), 2)))
    assert StagedDraw(settings, keys, ANY_LIMITS).num_deciding() <= num

    def chosen(given: Tensor) -> list[int]:
        given = given.clone().contiguous()
        is_bad = clear_unusable(given)
        return (
            ops.sample_tokens(given, settings, keys, ANY_LIMITS).masked_fill(is_bad, NON_FINITE_CODE).tolist()
        )

    def work(group: Group) -> list[int]:
        own = ShardSpan(logits.shape[1], uneven=True).piece(Shard(group.rank, group.size), "head")
        model = SimpleNamespace(own_logits=lambda hidden: logits[:, own])
        return chosen(first_tokens(model, group, own).logits(logits, num))

    assert on_all(InProcess.group(size), work) == [chosen(logits)] * size


def test_rows_without_top_k_use_all_tokens() -> None:
    settings = torch.tensor([[0.0, -INF, 99.0, 1.0], [0.5, -INF, 7.0, 1.0]], dtype=torch.float64)
    keys = torch.zeros(2, 2, dtype=torch.int64)
    assert StagedDraw(settings, keys, ANY_LIMITS).num_deciding() == 7
    settings[1, 2] = 99.0
    assert StagedDraw(settings, keys, ANY_LIMITS).num_deciding() == 99
    assert StagedRows([], None, None).num_deciding() == 1
    assert StagedRows([], None, cast("StagedLogprobs", object())).num_deciding() is None


@pytest.mark.parametrize("size", [2, 3, 4])
def test_first_token_equals_that_of_gathered_logits(size: int) -> None:
    logits = rows()

    def work(group: Group) -> list[int]:
        own = ShardSpan(logits.shape[1], uneven=True).piece(Shard(group.rank, group.size), "head")
        model = SimpleNamespace(own_logits=lambda hidden: logits[:, own])
        return first_tokens(model, group, own).codes(logits).tolist()

    assert on_all(InProcess.group(size), work) == [wanted(logits)] * size


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "gemma2", pytest.param("granite", marks=pytest.mark.more)])
def test_model_scales_its_first_tokens(name: str, tiny_model: Callable[[str], Path]) -> None:
    hidden = torch.randn(9, load_tiny(tiny_model(name)).config.arch.hidden_size)

    def both(model: CausalLM) -> tuple[list[int], list[int]]:
        first = FirstTokens.from_model(model)
        assert first is not None
        return first.codes(hidden).tolist(), wanted(model.compute_logits(hidden).contiguous())

    for found, expected in together(tiny_model(name), 2, both):
        assert found == expected
    assert FirstTokens.from_model(load_tiny(tiny_model(name))) is None


@needs_kernels
def test_steps_decided_by_few_tokens_gather_no_logits(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those in which somebody wants more than the likeliest ones, and with the same tokens."""
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())
    together_rows: list[int] = []
    of_all = VocabEmbedding._of_all

    def noted(head: VocabEmbedding, own: Tensor) -> Tensor:
        together_rows.append(len(own))
        return of_all(head, own)

    monkeypatch.setattr(VocabEmbedding, "_of_all", noted)
    greedy = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    few: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_k": 5}
    for more, are_few in (
        ({}, True),
        (few, True),
        (few | {"top_p": 0.8, "min_p": 0.01}, True),
        (few | {"top_k": 0}, False),
        (few | {"logprobs": 1}, False),
        (few | {"presence_penalty": 0.5}, False),
        ({"logprobs": 1}, False),
    ):
        other = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | more)
        outputs = []
        for ranks in (1, 2):
            engine = started(tiny_model("llama"), tensor_parallel_size=ranks, tp_invariant=True)
            together_rows.clear()
            outputs.append(said(run(engine, [greedy, other, greedy])))
            engine.shutdown()
        assert outputs[0] == outputs[1]
        assert bool(together_rows) != are_few


@pytest.mark.parametrize("num", [1, 2, 5, 10, 11])
def test_devices_find_the_first_ones_without_looking(num: int) -> None:
    """Rows without NaN match a stable sort, signs of zeros aside; a row with NaN has it first."""
    logits = rows()
    values, places = by_keys(logits, num)
    assert torch.equal(values.isnan(), logits.gather(1, places).isnan())
    for index, row in enumerate(logits):
        if row.isnan().any():
            assert values[index, 0].isnan()
        else:
            expected = row.sort(descending=True, stable=True)
            assert torch.equal(places[index], expected.indices[:num])
            assert torch.equal(values[index], expected.values[:num])
    negative = torch.tensor([[1.0, -NAN]])
    assert by_keys(torch.copysign(negative, torch.tensor(-1.0)), 1)[1].tolist() == [[1]]
