# SPDX-License-Identifier: Apache-2.0
"""The embedding included model."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from demo_model.evaluate_embedder import GOAL, SEED, by_quire
from demo_model.train_embedder import ASSETS, Embedder, all_facts, recall, sentence
from quire.config.model import DEMO_EMBEDDER

MOST_BYTES = 1 << 20


def test_a_held_out_question_is_next_to_its_fact() -> None:
    assert recall(by_quire(DEMO_EMBEDDER), SEED) >= GOAL


def test_embedding_equals_transformers() -> None:
    texts = [sentence(fact) for fact in all_facts()[::40]]
    model = AutoModel.from_pretrained(ASSETS, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = Embedder(model, Tokenizer.from_file(str(ASSETS / "tokenizer.json")))(texts)
    ours = by_quire(DEMO_EMBEDDER, matmul_precision="highest")(texts)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-5)


def test_embedding_model_file_is_small() -> None:
    assert sum(path.stat().st_size for path in ASSETS.rglob("*")) < MOST_BYTES
