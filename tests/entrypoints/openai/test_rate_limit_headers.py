# SPDX-License-Identifier: Apache-2.0
"""Tests of the response headers that report a key's rate limits."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from quire.entrypoints.openai.keys import Tenant
from quire.entrypoints.openai.middleware.quota import RATE_LIMIT_HEADERS, Meters, duration
from quire.metrics.stats import FinishedRequestStats, IterationStats
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

FILE = """
both: {keys: [b], requests_per_minute: 3, tokens_per_minute: 1000}
requests: {keys: [r], requests_per_minute: 60}
free: {keys: [f], max_concurrent: 2}
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "keys.yaml"
    file.write_text(FILE)
    return str(file)


def limits(response: httpx.Response) -> dict[str, str]:
    return {name: response.headers[name] for name in RATE_LIMIT_HEADERS if name in response.headers}


async def complete(client: httpx.AsyncClient, key: str, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "origin": "https://app.example"}
    return await client.post("/v1/completions", json={"prompt": "hi", **body}, headers=headers)


async def test_every_answer_to_work_states_the_remaining_limit(path: str) -> None:
    async with client_for(FakeEngine(), api_key_file=path) as client:
        answers = [await complete(client, "b", stream=stream) for stream in (False, True, False, False)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    told = [limits(answer) for answer in answers]
    assert [one["x-ratelimit-remaining-requests"] for one in told] == ["2", "1", "0", "0"]
    for one in told:
        assert one.keys() == set(RATE_LIMIT_HEADERS)
        assert one["x-ratelimit-limit-requests"] == "3"
        assert one["x-ratelimit-limit-tokens"] == "1000"
    assert told[3]["x-ratelimit-reset-requests"].endswith("s")


async def test_absent_limit_has_no_header(path: str) -> None:
    async with client_for(FakeEngine(), api_key_file=path) as client:
        told = limits(await complete(client, "r"))
        assert told.keys() == {name for name in RATE_LIMIT_HEADERS if name.endswith("requests")}
        assert limits(await complete(client, "f")) == {}
        assert limits(await complete(client, "wrong")) == {}
        models = await client.get("/v1/models", headers={"authorization": "Bearer r"})
        assert (models.status_code, limits(models)) == (200, {})


async def test_scripts_of_a_page_may_read_them(path: str) -> None:
    async with client_for(
        FakeEngine(), api_key_file=path, allowed_origins=("https://app.example",)
    ) as client:
        exposed = (await complete(client, "b")).headers["access-control-expose-headers"]
    assert set(RATE_LIMIT_HEADERS) <= {name.strip() for name in exposed.split(",")}


def test_computed_tokens_are_charged_and_refilled() -> None:
    now = 0.0
    meters = Meters({"a": Tenant(keys=["k"], tokens_per_minute=600)}, lambda: now)

    def told() -> list[str]:
        return [value.decode() for _, value in meters["a"].headers()]

    assert told() == ["600", "600", "0ms"]
    ended = FinishedRequestStats("stop", 100, 30, 40, 0, None, 0, 0, 0, 0, tenant="a")
    meters.record(IterationStats(finished=[ended]), None, 0)
    assert told() == ["600", "510", "9s"]
    now = 4.5
    assert told() == ["600", "555", "4.5s"]
    overdrawn = FinishedRequestStats("stop", 1199, 1, 0, 0, None, 0, 0, 0, 0, tenant="a")
    meters.record(IterationStats(finished=[overdrawn]), None, 0)
    assert told() == ["600", "0", "2m4.5s"]


@folded(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (59.9999, "1m0s"), (90.5, "1m30.5s"), (360, "6m0s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
