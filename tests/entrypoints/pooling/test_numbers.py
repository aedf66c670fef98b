# SPDX-License-Identifier: Apache-2.0
"""Tests of the limit of numbers per reply, and of the thread that encodes them."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.pooling import PoolingSpec
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling.server import protocol
from quire.pooling.server.protocol import INLINE_NUMBERS, beside_numbers, encoded
from quire.pooling_params import PoolingParams
from tests.entrypoints.pooling.conftest import Serve
from tests.fixtures.pooling import EMBEDDER, REWARDS, TOKEN_EMBEDDER


@given(
    shape=st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(0, 12), st.integers(1, 7))),
    most=st.integers(1, 20),
)
def test_pieces_make_the_same_json(shape: tuple[int, ...], most: int) -> None:
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / np.float32(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "INLINE_NUMBERS", most)
        assert json.loads(bytes(encoded(data, "float"))) == data.tolist()


@pytest.mark.parametrize(("size", "is_beside"), [(INLINE_NUMBERS, False), (INLINE_NUMBERS + 1, True)])
async def test_many_numbers_are_written_beside_the_event_loop(size: int, is_beside: bool) -> None:
    pooled = [PoolingRequestOutput("a", PoolingOutput(np.zeros(size, np.float32)), [1])]
    thread = await beside_numbers(pooled, threading.current_thread)
    assert (thread is not threading.current_thread()) == is_beside


@pytest.mark.parametrize(
    ("path", "spec", "body", "count"),
    [
        ("/v1/embeddings", EMBEDDER, {"input": ["abc", "d", "e"]}, 24),
        ("/v1/embeddings", EMBEDDER, {"input": ["abc"] * 6, "dimensions": 4}, 24),
        ("/v2/embed", EMBEDDER, {"texts": ["abc", "d", "e"]}, 24),
        ("/api/embed", EMBEDDER, {"model": "pooler", "input": ["abc", "d", "e"]}, 24),
        ("/pooling", EMBEDDER, {"input": "a", "task": "token_embed"}, 24),
        ("/pooling", REWARDS, {"input": [[7] * 12]}, 24),
    ],
)
async def test_reply_of_too_many_numbers_is_refused_uncomputed(
    serve: Serve, path: str, spec: PoolingSpec, body: dict[str, Any], count: int
) -> None:
    async with serve(spec, max_pooled_numbers=count) as client:
        fits = await client.post(path, json=body)
        assert fits.status_code == 200, fits.text
    async with serve(spec, max_pooled_numbers=count - 1) as client:
        client.engine.encode_all = None  # type: ignore[attr-defined]
        refused = await client.post(path, json=body)
    assert refused.status_code == 400
    assert f"makes {count} numbers" in refused.text
    assert f"at most {count - 1} are allowed (--max-pooled-numbers)" in refused.text


async def test_numbers_that_are_only_compared_are_counted(serve: Serve) -> None:
    async with serve(TOKEN_EMBEDDER, max_pooled_numbers=23) as client:
        reply = await client.post("/score", json={"text_1": "a", "text_2": "b"})
    assert reply.status_code == 400
    assert "24 numbers (token_embed); at most 23 are allowed" in reply.text


def test_steps_are_counted_and_not_tokens() -> None:
    assert REWARDS.num_numbers(PoolingParams(), [7, 1, 7, 2]) == 4
    assert REWARDS.num_numbers(PoolingParams(step_tag_id=1), [7, 1, 7, 2]) == 2
    assert REWARDS.num_numbers(PoolingParams(returned_token_ids=[1]), [7, 1, 7, 2]) == 2
