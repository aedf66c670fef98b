# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex's embeddings, and the example that joins them with its index and a chat model."""

from __future__ import annotations

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

from tests.clients.rag import answer
from tests.clients.rag import models as models


def test_llama_index_embeds_texts_and_queries(models: str) -> None:
    embeddings = OpenAILikeEmbedding(model_name="embed", api_base=f"{models}/v1", api_key="none")
    (text,) = embeddings.get_text_embedding_batch(["A young cow is called a calf."])
    assert len(text) == len(embeddings.get_query_embedding("What is a baby cow called?"))


def test_llama_index_finds_the_fact_and_answers(models: str) -> None:
    found, said = answer("rag_llamaindex.py", models, "What is the capital of France?").splitlines()
    assert found == "found:  The capital of France is Paris."
    assert "Paris" in said
