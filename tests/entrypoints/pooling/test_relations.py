# SPDX-License-Identifier: Apache-2.0
"""Test of relations between the fields of pooling requests, in any combination."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.config.pooling import PoolingSpec
from tests.entrypoints.openai.relations import is_relation
from tests.entrypoints.openai.test_openapi import body_validator
from tests.entrypoints.pooling.conftest import Serve
from tests.fixtures.pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDER, REWARDS

OF_POOLING: dict[str, list[Any]] = {
    "task": ["embed", "token_embed", "classify", "token_classify"],
    "encoding_format": ["float", "base64"],
    "dimensions": [1, 2, 4, 8],
    "returned_token_ids": [[0], [0, 1], [7]],
    "step_tag_id": [1],
    "use_activation": [True, False],
}
SIDES = ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")
CASES: dict[str, tuple[str, PoolingSpec, dict[str, Any], dict[str, list[Any]]]] = {
    "embedder": ("/pooling", EMBEDDER, {"input": "hi"}, OF_POOLING),
    "classifier": ("/pooling", CLASSIFIER, {"input": "hi"}, OF_POOLING),
    "rewards": ("/pooling", REWARDS, {"input": "hi"}, OF_POOLING),
    "score": ("/score", CROSS_ENCODER, {}, {side: ["hi", ["hi"], None] for side in SIDES}),
    "cohere": ("/v2/embed", EMBEDDER, {}, {
        "texts": [["hi"], None], "inputs": [[{"content": [{"type": "text", "text": "hi"}]}], None],
    }),
}  # fmt: skip
NUM_BODIES = 100


@pytest.mark.parametrize("case", list(CASES))
async def test_field_combinations_are_accepted_as_documented(case: str, serve: Serve) -> None:
    path, spec, base, fields = CASES[case]
    rng, outcomes = random.Random(case), set()
    async with serve(spec) as client:
        validator = body_validator((await client.get("/openapi.json")).json(), path)
        for _ in range(NUM_BODIES):
            names = rng.sample(sorted(fields), rng.randint(1, min(4, len(fields))))
            body = base | {name: rng.choice(fields[name]) for name in names}
            response = await client.post(path, json=body)
            fits, taken = validator.is_valid(body), response.status_code == 200
            assert fits or not taken, f"{body} is taken"
            assert taken or not fits or is_relation(response.text, body), f"{body}: {response.text}"
            outcomes.add((fits, taken))
    assert {(True, True), (False, False)} <= outcomes
