# SPDX-License-Identifier: Apache-2.0
"""Every family's logits against transformers' float32 run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fixtures.foreign_models import FOREIGN
from tests.fixtures.plain_models import PLAIN
from tests.fixtures.tiny_models import TINY_MODELS, VOCAB_SIZE, oracle_of
from tests.models.harness import load_tiny, logits_of

LENGTHS = (1, 5, 17, 40, 96)
"""Prompt lengths; the windows of the tiny models are 8. All but the longest are cut into chunks, too."""
TOLERANCE = 1e-4


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def oracle_logits(model_dir: Path, sequences: list[list[int]]) -> list[Tensor]:
    model = oracle_of(model_dir)
    return [model(torch.tensor([sequence])).logits[0] for sequence in sequences]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_one, theirs_one, rtol=0.0, atol=TOLERANCE)


# phi3-longrope depends on the longest allowed sequence and has its own tests below.
@pytest.mark.parametrize(
    "name", sorted((TINY_MODELS.keys() | FOREIGN.keys() | PLAIN.keys()) - {"phi3-longrope"})
)
def test_logits_equal_transformers(name: str, tiny_model: Callable[[str], Path]) -> None:
    sequences = prompts()
    model = load_tiny(tiny_model(name))
    expected = oracle_logits(tiny_model(name), sequences)
    assert max(logits.abs().max().item() for logits in expected) > 0.5, "logits too small to tell anything"
    assert_close(logits_of(model, sequences, chunk_sizes=[max(LENGTHS)]), expected)
    assert_close(logits_of(model, sequences[:-1], chunk_sizes=[3, 1, 13]), expected[:-1])


def test_longrope_within_the_original_context(tiny_model: Callable[[str], Path]) -> None:
    directory, sequences = tiny_model("phi3-longrope"), prompts((3, 32))
    model = load_tiny(directory, max_model_len=32)
    assert_close(logits_of(model, sequences, chunk_sizes=[5]), oracle_logits(directory, sequences))


def test_longrope_beyond_the_original_context(tiny_model: Callable[[str], Path]) -> None:
    """transformers takes the long factors for sequences longer than 32; here, a longer limit is enough."""
    directory, sequences = tiny_model("phi3-longrope"), prompts((33, 80))
    model = load_tiny(directory, max_model_len=128)
    assert_close(logits_of(model, sequences, chunk_sizes=[5]), oracle_logits(directory, sequences))


def test_dynamic_within_the_trained_context_of_a_longer_limit(tiny_model: Callable[[str], Path]) -> None:
    directory, sequences = tiny_model("llama-dynamic"), prompts()
    model = load_tiny(directory, max_model_len=1024)
    assert_close(logits_of(model, sequences, chunk_sizes=[5]), oracle_logits(directory, sequences))
