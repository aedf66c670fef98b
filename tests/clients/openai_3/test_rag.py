# SPDX-License-Identifier: Apache-2.0
"""examples/rag_langchain.py, with langchain_openai."""

from __future__ import annotations

from tests.clients.rag import answer
from tests.clients.rag import models as models


def test_langchain_finds_the_fact_and_answers(models: str) -> None:
    found, said = answer("rag_langchain.py", models, "What is the capital of France?").splitlines()
    assert found == "found:  The capital of France is Paris."
    assert "Paris" in said
