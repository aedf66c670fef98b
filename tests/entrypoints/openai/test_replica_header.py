# SPDX-License-Identifier: Apache-2.0
"""The header by which a client, or a load balancer, names the replica that is to compute a request."""

from __future__ import annotations

from typing import Any

import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for
from tests.entrypoints.openai.test_deadline import CHAT, COMPLETION

MESSAGES: tuple[str, dict[str, Any]] = (
    "/v1/messages",
    {"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]},
)
ROUTES = pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT, MESSAGES])


@ROUTES
async def test_replica_is_selected_by_its_number(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with client_for(engine) as client:
        await client.post(path, json=body, headers={"X-data-parallel-rank": "3"})
        await client.post(path, json=body)
    assert engine.replicas == [3, None]


async def test_replica_header_without_a_number_is_refused() -> None:
    path, body = CHAT
    async with client_for(FakeEngine()) as client:
        for header in ("-1", "1.0", "", "all", "1" * 10):
            response = await client.post(path, json=body, headers={"X-data-parallel-rank": header})
            assert response.status_code == 400, header
            assert response.json()["error"]["param"] == "data_parallel_rank"
