# SPDX-License-Identifier: Apache-2.0
"""Encoders with real weights: what they make of texts, beside transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire import LLM

pytestmark = pytest.mark.real

TEXTS = (
    "The capital of Japan is Tokyo.",
    "a",
    "Ein Käfer saß auf der Straße 🐞 und 東京",
    "word " * 180,
)


def states_of(directory: Path, text: str) -> torch.Tensor:
    """Return transformers' last hidden states of a text: [tokens, width]."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(
            **tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        ).last_hidden_state[0]


def test_minilm_embeddings_equal_transformers(real: Callable[[str], Path]) -> None:
    directory = real("minilm")
    llm = LLM(str(directory), device="cpu", dtype="float32")
    for text, output in zip(TEXTS, llm.embed(list(TEXTS)), strict=True):
        mean = states_of(directory, text).mean(0)
        expected = mean / mean.norm()
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0.0, atol=1e-5)
    llm.shutdown()


def test_bert_with_names_of_2018_equals_transformers(real: Callable[[str], Path]) -> None:
    """LayerNorm.gamma and beta, as Google's own checkpoints have them."""
    directory = real("splade")
    llm = LLM(str(directory), device="cpu", dtype="float32")
    for text in TEXTS[:3]:
        (output,) = llm.encode(text, pooling_task="token_embed")
        ours, states = torch.as_tensor(output.outputs.data.copy()), states_of(directory, text)
        expected = states / states.norm(dim=1, keepdim=True)
        torch.testing.assert_close(ours, expected, rtol=0.0, atol=1e-5)
    llm.shutdown()
