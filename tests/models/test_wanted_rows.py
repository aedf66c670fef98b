# SPDX-License-Identifier: Apache-2.0
"""Tests of a last layer that may skip unread rows; read rows have the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quire.layers.step import StepContext
from quire.models.base import CausalLM
from tests.fixtures.quick import quick_models
from tests.models.harness import load_tiny
from tests.models.test_stages import EVERY_FAMILY, logits

CHOSEN = {"llama", "gemma2", "qwen2", "mixtral", "jamba"}


class Wanting(nn.Module):
    """A model of which some rows of each step are read, perhaps none or all; the others are NaN afterwards."""

    def __init__(self, model: CausalLM, seed: int) -> None:
        super().__init__()
        self.model = model
        self.compute_logits = model.compute_logits
        self._random = random.Random(seed)
        self.left: list[Tensor] = []

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        num = len(inputs)
        wanted = sorted(self._random.sample(range(num), self._random.randrange(num + 1)))
        hidden: Tensor = self.model(
            inputs, positions, replace(step, wanted=torch.tensor(wanted, dtype=torch.int64))
        )
        unread = sorted(set(range(num)) - set(wanted))
        self.left.append(hidden[unread].clone())
        hidden = hidden.clone()
        hidden[unread] = torch.nan
        return hidden


@pytest.mark.parametrize("name", quick_models(sorted(EVERY_FAMILY), CHOSEN))
def test_read_rows_have_the_bits_of_a_step_with_all_rows(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    model = load_tiny(tiny_model(name))
    whole = logits(model)
    seen = torch.zeros(len(whole), dtype=torch.bool)
    for seed in range(8):
        some = logits(Wanting(model, seed))
        read = ~some.isnan().any(dim=1)
        assert torch.equal(some[read], whole[read])
        seen |= read
    assert seen.all(), "each row was read once"


@pytest.mark.parametrize(("name", "leaves_out"), [("llama", True), ("gemma2", True), ("olmo2", False)])
def test_the_last_layer_makes_no_more_than_is_read(
    name: str, leaves_out: bool, tiny_model: Callable[[str], Path]
) -> None:
    model = Wanting(load_tiny(tiny_model(name)), 1)
    logits(model)
    left = torch.cat(model.left)
    assert len(left) > 5
    assert bool((left == 0).all()) is leaves_out
