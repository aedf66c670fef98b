# SPDX-License-Identifier: Apache-2.0
"""Tests of the server's startup message, which fits the model that it serves."""

from __future__ import annotations

import pytest

from quire.config.pooling import PoolingSpec
from quire.entrypoints.openai.greeting import EMBEDDING, greeting_of, python_example, ready_text
from tests.entrypoints.pooling.conftest import Serve
from tests.fixtures.pooling import CROSS_ENCODER, EMBEDDER, REWARDS, TOKEN_EMBEDDER

CLASSIFIER = PoolingSpec(("classify",), "cls", 3, activation="softmax")


@pytest.mark.parametrize("spec", [EMBEDDER, TOKEN_EMBEDDER, CLASSIFIER, CROSS_ENCODER, REWARDS])
async def test_the_request_that_is_shown_is_answered(spec: PoolingSpec, serve: Serve) -> None:
    greeting = greeting_of(spec, has_chat=True)
    async with serve(spec) as client:
        response = await client.post(greeting.path, json={"model": "pooler", **greeting.body})
        assert response.status_code == 200, response.text
    text = ready_text("http://x", "pooler", greeting, needs_key=False)
    assert f"curl http://x{greeting.path}" in text
    assert ("from openai" in text) == (greeting is EMBEDDING)


def test_an_embedding_by_the_client_of_openai() -> None:
    python = python_example("http://x", "pooler", EMBEDDING, needs_key=False)
    assert 'client.embeddings.create(model="pooler", input="Once upon a time")' in python
    assert python.endswith("print(reply.data[0].embedding)")
