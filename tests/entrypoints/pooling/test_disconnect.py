# SPDX-License-Identifier: Apache-2.0
"""A client that goes away takes its request along, also while what it sent is tokenized."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.config.pooling import PoolingSpec
from quire.pooling.server import run
from tests.entrypoints.openai.test_disconnect import Client
from tests.entrypoints.pooling.conftest import Serve
from tests.fixtures.pooling import CROSS_ENCODER, EMBEDDER

BODIES: dict[str, tuple[PoolingSpec, dict[str, Any]]] = {
    "/v1/embeddings": (EMBEDDER, {"input": ["hi", "ho"]}),
    "/pooling": (EMBEDDER, {"input": "hi"}),
    "/score": (CROSS_ENCODER, {"text_1": "hi", "text_2": "ho"}),
    "/v2/embed": (EMBEDDER, {"texts": ["hi"]}),
}


@pytest.mark.item(32)
@pytest.mark.parametrize("path", list(BODIES))
async def test_disconnect_while_it_is_tokenized(
    path: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, body = BODIES[path]
    begun = asyncio.Event()

    async def endless(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    async with serve(spec) as http:
        app, engine = http._app, http.engine  # type: ignore[attr-defined]
        monkeypatch.setattr(run, "beside_loop", endless)
        client = Client(path, body)
        serving = asyncio.create_task(app(client.scope, client.receive, client.send))
        await asyncio.wait_for(begun.wait(), 30)
        client.gone.set()
        await asyncio.wait_for(serving, 30)
        assert not client.sent
        assert len(app.state.server.in_flight) == 0
        assert len(engine.output_processor.waiting) == engine.num_unfinished_requests() == 0
