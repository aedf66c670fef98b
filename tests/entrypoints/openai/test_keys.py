# SPDX-License-Identifier: Apache-2.0
"""Keys and tenants: what a file may say, whose share, cache and limits a request gets, and that no key is kept."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.openai.app import keyring
from quire.entrypoints.openai.keys import Keyring, Tenant, make_keyring, with_keys_of_environment
from quire.entrypoints.openai.middleware.quota import Meters, TokenBucket
from quire.entrypoints.openai.processes.channel import WorkerHello
from quire.errors import ConfigError, RateLimitError
from quire.metrics.stats import FinishedRequestStats, IterationStats
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

FILE = f"""
research:
  keys: [r-one, "sha256:{hashlib.sha256(b"r-two").hexdigest()}"]
  max_concurrent: 2
shop:
  keys: [s-one]
  shared_cache: true
  requests_per_minute: 2
"""
HI = {"prompt": "hi"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "keys.yaml"
    file.write_text(FILE)
    return str(file)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def complete(client: httpx.AsyncClient, key: str, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={**HI, **body}, headers=bearer(key))


@pytest.mark.item(23)
def test_plain_and_hashed_keys_open_and_none_is_kept(path: str) -> None:
    ring = make_keyring(["flag-key"], path)
    owners = [ring.tenant_of(key) for key in (b"r-one", b"r-two", b"s-one", b"flag-key")]
    assert owners[:3] == ["research", "research", "shop"]
    assert owners[3] is not None
    assert owners[3].startswith("key-")
    hashed = hashlib.sha256(b"r-two").hexdigest()
    for wrong in (b"", b"r-one ", b"R-ONE", b"research", f"sha256:{hashed}".encode(), hashed.encode()):
        assert ring.tenant_of(wrong) is None
    assert {len(kept) for kept in ring._names} == {32}, "digests only"


@pytest.mark.item(23)
def test_keys_are_kept_and_passed_on_as_hashes_only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "of-the-environment")
    monkeypatch.setenv("QUIRE_API_KEY", "of-nobody")
    config = with_keys_of_environment(ServerConfig(api_key=("flag-key",), api_key_file=path))
    assert not os.environ.keys() & {"QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY"}
    ring = keyring(config)
    hello = msgspec.json.encode(WorkerHello(1, 2, 1, EngineConfig(), config, ring.tenants)).decode()
    kept = hello + repr(config) + repr(vars(ring))
    assert not [key for key in ("flag-key", "of-the-environment", "r-one", "s-one") if key in kept]
    passed_on = Keyring(msgspec.json.decode(hello, type=WorkerHello).tenants)
    for key in (b"flag-key", b"of-the-environment", b"r-one", b"r-two", b"s-one"):
        assert passed_on.tenant_of(key) == ring.tenant_of(key) is not None
    assert ring.tenant_of(b"of-nobody") is None, "the flag is meant"


@pytest.mark.parametrize("key", ["", " k", "sha256:12"])
def test_invalid_key_by_flag_is_an_error_without_the_key(key: str) -> None:
    for name, value in (("api_key", (key,)), ("admin_api_key", key or " ")):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: a key") as error:
            ServerConfig(**{name: value})
        assert repr(key) not in str(error.value)


@folded(
    ("text", "problem"),
    [
        ("a: [", "is not YAML"),
        ("- a", "Expected `object`"),
        ("a: {keys: [k], wait: 1}", "unknown field `wait`"),
        ("a: {keys: [k], max_concurrent: 0}", "max_concurrent"),
        ("a: {keys: [k], weight: 0}", "weight"),
        ("a: {keys: [k], weight: .inf}", "finite"),
        ("a: {}", "a key"),
        ("a: {keys: ['']}", "empty"),
        ("a: {keys: ['sha256:12']}", "64 hex digits"),
        ("a: {keys: [k]}\nb: {keys: [k]}", "the same key"),
    ],
)
def test_wrong_key_file_is_reported_at_the_start(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        make_keyring((), str(file))
    with pytest.raises(ConfigError, match="No such file"):
        make_keyring((), str(tmp_path / "none"))


def test_weights_reach_the_scheduler_and_need_its_policy() -> None:
    ring = Keyring({"a": Tenant(keys=["k"], weight=3.0), "b": Tenant(keys=["l"])})
    fair = EngineConfig.from_args(model="m", scheduling_policy="fair", fair_weights={"c": 2.0})
    assert ring.weighted(fair).scheduler.fair_weights == {"a": 3.0, "c": 2.0}
    with pytest.raises(ConfigError, match="scheduling-policy fair"):
        ring.weighted(EngineConfig.from_args(model="m"))
    with pytest.raises(ConfigError, match="scheduling-policy priority"):
        Keyring({"a": Tenant(keys=["k"], priority=1)}).weighted(fair)


async def test_the_key_names_the_tenant_and_salts_its_cache(path: str) -> None:
    engine = FakeEngine()
    async with client_for(engine, api_key_file=path, api_key=("flag-key",)) as client:
        for key, salt in (
            ("r-one", None),
            ("r-two", None),
            ("r-one", "x"),
            ("s-one", None),
            ("flag-key", None),
        ):
            fields = {} if salt is None else {"cache_salt": salt}
            assert (await complete(client, key, **fields)).status_code == 200
        assert (await complete(client, "wrong")).status_code == 401
    assert engine.tenants[:-1] == ["research", "research", "research", "shop"]
    first, same, other, shared, by_flag = [prompt.get("cache_salt") for prompt, _ in engine.seen]
    assert by_flag not in (None, first, other)
    assert first == same
    assert first != other
    assert {len(first), len(other)} == {64}
    assert shared is None


async def test_the_key_decides_how_urgent_a_request_is(tmp_path: Path) -> None:
    """In the file's tenants it may leave that to the request; a key by flag does."""
    file = tmp_path / "keys.yaml"
    file.write_text("high: {keys: [h], priority: -5}\nlow: {keys: [l]}\nown: {keys: [o], own_priority: true}")
    engine = FakeEngine(scheduling_policy="priority")
    given: list[int] = []
    generate = engine.generate

    def watched(*args: Any, priority: int, **terms: Any) -> Any:
        given.append(priority)
        return generate(*args, priority=priority, **terms)

    engine.generate = watched  # type: ignore[method-assign]
    async with client_for(engine, api_key_file=str(file), api_key=("flag",)) as client:
        for key, sent, told in (
            ("h", {}, None),
            ("h", {"priority": 9}, "priority"),
            ("h", {"priority": -5}, None),
            ("l", {"priority": -9}, "priority"),
            ("o", {"priority": -9}, None),
            ("flag", {"priority": 3}, None),
        ):
            answer = await complete(client, key, **sent)
            assert answer.json().get("ignored") == (None if told is None else [told])
    assert given == [-5, -5, -5, 0, -9, 3]


@pytest.mark.item(30)
async def test_more_at_once_than_a_tenant_may_is_429_and_others_go_on(path: str) -> None:
    engine = FakeEngine()
    engine.hold_after = 0
    async with client_for(engine, api_key_file=path) as client:
        running = [asyncio.create_task(complete(client, key)) for key in ("r-one", "r-two")]
        async with asyncio.timeout(300):
            while len(engine.running) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        refused = await complete(client, "r-one")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert (await client.get("/v1/models", headers=bearer("r-one"))).status_code == 200, (
            "only work counts"
        )
        engine.hold_after = None
        assert (await complete(client, "s-one")).status_code == 200
        engine.died.set()
        await asyncio.gather(*running)
        assert (await complete(client, "r-one")).status_code == 200


async def test_requests_per_minute(path: str) -> None:
    async with client_for(FakeEngine(), api_key_file=path) as client:
        answers = [await complete(client, "s-one") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert 20 <= int(answers[2].headers["retry-after"]) <= 30
        assert (await complete(client, "r-one")).status_code == 200


def test_computed_tokens_are_charged_before_the_next_request() -> None:
    now = 0.0
    meters = Meters({"a": Tenant(keys=["k"], tokens_per_minute=60), "b": Tenant(keys=["l"])}, lambda: now)
    meters["a"].enter()
    ended = FinishedRequestStats("stop", 100, 30, 40, 0, None, 0, 0, 0, 0, tenant="a")
    meters.record(IterationStats(finished=[ended]), None, 0)
    meters["a"].leave()
    with pytest.raises(RateLimitError, match="60 tokens per minute") as error:
        meters["a"].enter()
    assert error.value.retry_after == 31, "60 - (100 - 40 + 30) tokens are owed, and one is to be there"
    meters["b"].enter()
    now = 31.0
    meters["a"].enter()


def test_uncomputed_tokens_are_not_charged() -> None:
    meters = Meters({"a": Tenant(keys=["k"], tokens_per_minute=1000)}, lambda: 0.0)

    def left() -> str:
        return dict(meters["a"].headers())[b"x-ratelimit-remaining-tokens"].decode()

    in_queue = FinishedRequestStats("abort", 900, 0, 0, 0, None, 0, 0, 0, 0, tenant="a")
    fork = FinishedRequestStats("stop", 900, 7, 0, 0, None, 0, 0, 0, 0, tenant="a", is_fork=True)
    meters.record(IterationStats(finished=[in_queue, fork]), None, 0)
    assert left() == "993"
    meters.record(IterationStats(wasted_prompt_tokens={"a": 93, "nobody": 5}), None, 0)
    assert left() == "900"


def test_a_bucket_fills_up_to_its_limit() -> None:
    now = 0.0
    bucket = TokenBucket(6, lambda: now, [0.0, 0.0])
    bucket.take(6)
    assert bucket.wait_s(1) == 10.0
    now = 1000.0
    assert bucket.wait_s(6) == 0.0
    assert bucket.wait_s(7) > 0
