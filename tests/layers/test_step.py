"""What a step hands to layers: metadata of their kind, adapter rows; and models that are given rows instead of ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.attention_metadata import AttentionMetadata, StateMetadata
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.step import StepContext
from tests.models.harness import load_tiny, logits_of

PROMPTS = [[5, 6, 7], list(range(40, 52)), [9]]


class AdaptedLinear(Linear):
    """A linear layer that adds to each row what the row's adapter makes of it."""

    adapters: Tensor

    def forward(self, x: Tensor, step: StepContext) -> Tensor:  # type: ignore[override]
        assert step.adapter_rows is not None
        out = super().forward(x, step)
        for row, adapter in enumerate(step.adapter_rows.tolist()):
            if adapter >= 0:
                out[row] += self.adapters[adapter] @ x[row]
        return out


@pytest.mark.skipif(not cpu.available(), reason="torch's sums depend on the batch")
def test_linears_know_whose_their_rows_are(tiny_model: Callable[[str], Path]) -> None:
    """Two adapters and none in one batch: each sequence has the bits that it has alone."""
    model = load_tiny(tiny_model("llama"))
    plain = logits_of(model, [PROMPTS[1]], chunk_sizes=[4])[0]
    for module in model.modules():
        if type(module) is Linear:
            assert module.packed is not None
            module.__class__ = AdaptedLinear
            module.adapters = torch.randn(2, module.packed.outputs, module.packed.inputs) / 10
    adapters = [0, -1, 1]
    together = logits_of(model, PROMPTS, chunk_sizes=[4, 1], adapters=adapters)
    assert torch.equal(together[1], plain)
    for prompt, adapter, ours in zip(PROMPTS, adapters, together, strict=True):
        assert torch.equal(ours, logits_of(model, [prompt], chunk_sizes=[9], adapters=[adapter])[0])
    other = logits_of(model, PROMPTS, chunk_sizes=[4], adapters=[1, 0, 0])
    assert not any(map(torch.equal, together, other)), "every adapter says something else"


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
def test_several_rows_of_positions_are_refused_by_who_takes_one(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    model = load_tiny(tiny_model(name))
    with pytest.raises(AssertionError, match=r"\[T\], not \[3, 16\]"):
        logits_of(model, PROMPTS, chunk_sizes=[99], positions=lambda positions: positions.expand(3, -1))
