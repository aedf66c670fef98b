"""Ranks that share a vocabulary find its likeliest token as one that has all logits does, and show little."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.distributed.in_process import InProcess
from quire.kernels import ops
from quire.kernels.cpu import library
from quire.kernels.limits import NO_LIMITS
from quire.layers.embedding import VocabEmbedding
from quire.layers.shard import Shard, Span
from quire.models.base import CausalLM
from quire.sampling_params import SamplingParams
from quire.worker.first_tokens import FirstTokens
from quire.worker.sampler.sampler import NON_FINITE_CODE, clear_unusable
from tests.distributed.test_group import on_all
from tests.executor.test_multiproc import run, said, started
from tests.fixtures.thread_ranks import ThreadRanks
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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_is_the_token_that_all_logits_together_give(size: int) -> None:
    logits = rows()

    def work(group: Group) -> list[int]:
        own = Span(logits.shape[1], uneven=True).piece(Shard(group.rank, group.size), "head")
        model = SimpleNamespace(own_logits=lambda hidden: logits[:, own])
        return FirstTokens(cast("CausalLM", model), group, own.start).codes(logits).tolist()

    assert on_all(InProcess.group(size), work) == [wanted(logits)] * size


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "gemma2", pytest.param("granite", marks=pytest.mark.more)])
def test_a_model_scales_what_it_shows(name: str, tiny_model: Callable[[str], Path]) -> None:
    hidden = torch.randn(9, load_tiny(tiny_model(name)).config.arch.hidden_size)

    def both(model: CausalLM) -> tuple[list[int], list[int]]:
        first = FirstTokens.of_model(model)
        assert first is not None
        return first.codes(hidden).tolist(), wanted(model.compute_logits(hidden).contiguous())

    for found, expected in together(tiny_model(name), 2, both):
        assert found == expected
    assert FirstTokens.of_model(load_tiny(tiny_model(name))) is None


@needs_kernels
def test_greedy_steps_do_not_bring_logits_together(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those in which somebody wants more than the likeliest token, and with the same tokens."""
    monkeypatch.setattr("quire.executor.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.multiproc.Answers", lambda ranks: Future())
    together_rows: list[int] = []
    of_all = VocabEmbedding._of_all

    def noted(head: VocabEmbedding, own: Tensor) -> Tensor:
        together_rows.append(len(own))
        return of_all(head, own)

    monkeypatch.setattr(VocabEmbedding, "_of_all", noted)
    greedy = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    for more in ({}, {"logprobs": 1}, {"temperature": 1.0, "seed": 3}, {"presence_penalty": 0.5}):
        other = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | more)
        outputs = []
        for ranks in (1, 2):
            engine = started(tiny_model("llama"), tensor_parallel_size=ranks, tp_invariant=True)
            together_rows.clear()
            outputs.append(said(run(engine, [greedy, other, greedy])))
            engine.shutdown()
        assert outputs[0] == outputs[1]
        assert bool(together_rows) == bool(more)
