# SPDX-License-Identifier: Apache-2.0
"""The document of a pooling model: what fits it is taken, and what does not is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.pooling import PoolingSpec
from tests.entrypoints.openai.relations import is_relation
from tests.entrypoints.openai.test_openapi import _cases, body_validator, references
from tests.entrypoints.pooling.conftest import Serve
from tests.fixtures.pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDER

BODIES: dict[str, tuple[PoolingSpec, dict[str, Any]]] = {
    "/v1/embeddings": (EMBEDDER, {"input": "hi"}),
    "/pooling": (EMBEDDER, {"input": "hi"}),
    "/classify": (CLASSIFIER, {"input": "hi"}),
    "/score": (CROSS_ENCODER, {"text_1": "hi", "text_2": "ho"}),
    "/v2/rerank": (CROSS_ENCODER, {"query": "hi", "documents": ["ho"]}),
    "/v2/embed": (EMBEDDER, {"texts": ["hi"]}),
    "/api/embed": (EMBEDDER, {"model": "pooler", "input": "hi"}),
    "/api/embeddings": (EMBEDDER, {"model": "pooler", "prompt": "hi"}),
}


@pytest.mark.parametrize("path", list(BODIES))
async def test_schema_accepts_exactly_the_bodies_that_are_served(path: str, serve: Serve) -> None:
    """Each field of each request with each odd value, with a sixth of them if an earlier route has it, too."""
    spec, base = BODIES[path]
    earlier = [other for other in list(BODIES)[: list(BODIES).index(path)] if BODIES[other][0] is spec]
    async with serve(spec) as client:
        written = (await client.get("/openapi.json")).json()
        validator = body_validator(written, path)
        for field, value in _cases(written, path, earlier):
            body = {**base, field: value}
            response = await client.post(path, json=body)
            fits, taken = validator.is_valid(body), response.status_code == 200
            assert fits or not taken, f"{body} is taken"
            assert taken or not fits or is_relation(response.text, body), f"{body}: {response.text}"


async def test_references_lead_somewhere(serve: Serve) -> None:
    async with serve(EMBEDDER) as client:
        written = (await client.get("/openapi.json")).json()
    for reference in set(references(written)):
        node = written
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]
