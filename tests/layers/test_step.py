# SPDX-License-Identifier: Apache-2.0
"""Tests of a step's metadata for layers of each kind, and of models that take rows instead of ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels.attention_metadata import AttentionMetadata, StateMetadata
from quire.layers.embedding import VocabEmbedding
from quire.layers.step import StepContext
from tests.models.harness import load_tiny, logits_of

PROMPTS = [[5, 6, 7], list(range(40, 52)), [9]]


def test_a_layer_gets_the_metadata_of_its_group_and_kind() -> None:
    shared = (torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[1]]), 1, 1)
    attention, states = AttentionMetadata(*shared, torch.tensor([4])), StateMetadata(*shared, 4)
    step = StepContext((attention, states))
    assert step.metadata(0, AttentionMetadata) is attention
    assert step.metadata(1, StateMetadata) is states
    with pytest.raises(AssertionError, match="group 1 has StateMetadata, not AttentionMetadata"):
        step.metadata(1, AttentionMetadata)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "opt-post-norm"])
def test_rows_stand_for_their_ids(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Bit for bit, whatever a family does to what it has looked up; and the rows are left as they were."""
    model = load_tiny(tiny_model(name))
    embedding = next(module for module in model.modules() if isinstance(module, VocabEmbedding))
    given: list[tuple[Tensor, Tensor]] = []

    def rows(ids: Tensor) -> Tensor:
        given.append((embedding(ids), embedding(ids)))
        return given[-1][0]

    expected = logits_of(model, PROMPTS, chunk_sizes=[4])
    for ours, theirs in zip(logits_of(model, PROMPTS, chunk_sizes=[4], inputs=rows), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(after, before) for after, before in given)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_model_of_one_position_row_refuses_several(name: str, tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model(name))
    with pytest.raises(AssertionError, match=r"\[T\], not \[3, 16\]"):
        logits_of(model, PROMPTS, chunk_sizes=[99], positions=lambda positions: positions.expand(3, -1))
