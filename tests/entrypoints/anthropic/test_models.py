# SPDX-License-Identifier: Apache-2.0
"""The served models as Anthropic's clients list them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

NAMES = [f"a{number}" for number in range(45)]


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    engine = FakeEngine(enable_lora=True)
    async with client_for(engine, lora_modules=tuple(f"{name}=/{name}" for name in NAMES[1:])) as client:
        client.headers["anthropic-version"] = "2023-06-01"
        yield client


async def test_models_are_listed_in_pages(client: httpx.AsyncClient) -> None:
    listed: list[str] = []
    query: dict[str, str] = {}
    while True:
        page = (await client.get("/v1/models", params=query)).json()
        ids = [one["id"] for one in page["data"]]
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
        listed += ids
        if not page["has_more"]:
            break
        assert len(ids) == 20
        query = {"after_id": page["last_id"]}
    assert listed == ["fake-model", *NAMES[1:]]


@pytest.mark.parametrize("limit", [1, 7, 1000])
async def test_models_are_listed_backwards_in_pages(client: httpx.AsyncClient, limit: int) -> None:
    listed: list[str] = []
    before = NAMES[-1]
    while True:
        page = (await client.get("/v1/models", params={"before_id": before, "limit": limit})).json()
        listed = [one["id"] for one in page["data"]] + listed
        if not page["has_more"]:
            break
        before = page["first_id"]
    assert listed == ["fake-model", *NAMES[1:-1]]


async def test_models_page_behind_the_last_is_empty(client: httpx.AsyncClient) -> None:
    page = (await client.get("/v1/models", params={"after_id": NAMES[-1]})).json()
    assert page == {"data": [], "has_more": False, "first_id": None, "last_id": None}


async def test_model_has_the_fields_of_anthropics_api(client: httpx.AsyncClient) -> None:
    one = (await client.get("/v1/models/fake-model")).json()
    assert (one["type"], one["id"], one["display_name"]) == ("model", "fake-model", "fake-model")
    assert datetime.fromisoformat(one["created_at"]).tzinfo is not None
    assert one == (await client.get("/v1/models?limit=1")).json()["data"][0]


async def test_model_that_is_unknown_is_anthropics_error(client: httpx.AsyncClient) -> None:
    reply = await client.get("/v1/models/none")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    assert reply.json()["request_id"] == reply.headers["x-request-id"]


@folded(
    ("query", "status", "kind"),
    [
        *(
            (f"limit={limit}", 400, "invalid_request_error")
            for limit in ("0", "x", "1001", "", "x&limit=1", "1&limit=1")
        ),
        *((f"{name}=none", 404, "not_found_error") for name in ("after_id", "before_id")),
    ],
)
async def test_models_query_that_is_wrong_is_refused(
    client: httpx.AsyncClient, query: str, status: int, kind: str
) -> None:
    reply = await client.get(f"/v1/models?{query}")
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


async def test_models_between_two_ids_are_listed(client: httpx.AsyncClient) -> None:
    page = (await client.get("/v1/models?after_id=a1&before_id=a5&limit=2")).json()
    assert ([one["id"] for one in page["data"]], page["has_more"]) == (["a2", "a3"], True)


async def test_models_without_the_header_are_openais(client: httpx.AsyncClient) -> None:
    del client.headers["anthropic-version"]
    assert (await client.get("/v1/models?limit=x")).status_code == 400
    assert (await client.get("/v1/models")).json()["object"] == "list"
    assert (await client.get("/v1/models/fake-model")).json()["object"] == "model"
