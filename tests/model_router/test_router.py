# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP: routing, streams, evictions, deaths, keys and foreign APIs, with fake models' servers."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest

from quire.config import ModelRouterConfig, ServerConfig
from quire.entrypoints.ollama.models import FOREVER
from quire.errors import ConfigError
from tests.fixtures.folded import folded
from tests.model_router.fakes import MIB, entry, serving

SSE = "text/event-stream"


async def test_request_goes_to_its_model_unchanged() -> None:
    async with serving(entry("a", aliases=("other",)), entry("b")) as service:
        body = b'{ "prompt": "\\u00e9",  "model": "b" }'
        headers = {"content-type": "application/json", "x-request-id": "mine"}
        reply = await service.client.post("/v1/completions?x=%2F", content=body, headers=headers)
        said = reply.json()
        assert (said["child"], said["body"], said["query"]) == ("b", body.decode(), "x=%2F")
        assert said["headers"]["x-request-id"] == "mine"
        assert reply.headers.get_list("x-request-id") == ["mine"]
        assert len(reply.headers.get_list("date")) == 1
        for name in ("a", "other", "a:latest"):
            assert (await service.ask(name)).json()["child"] == "a"
        assert service.child("a").flags["served-model-name"] == ["a", "other"]


@pytest.mark.parametrize(("query", "body", "child"), [("?model=b", {"model": "a"}, "b"), ("", {}, "a")])
async def test_query_comes_before_the_body_then_the_default(
    query: str, body: dict[str, str], child: str
) -> None:
    async with serving(entry("a"), entry("b"), default="a") as service:
        reply = await service.client.post(f"/v1/chat/completions{query}", json=body)
        assert reply.json()["child"] == child


async def test_unknown_model_is_404_and_names_the_known() -> None:
    async with serving(entry("a"), entry("b")) as service:
        reply = await service.ask("c")
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == "the model 'c' does not exist; there are a, b"
        assert service.starter.num_starts == {}


@folded("body", [b"{}", b"", b"not json", b"[1]", b'{"model": 5}', b'{"model": null}'])
async def test_request_without_a_model_is_400(body: bytes) -> None:
    async with serving(entry("a"), entry("b")) as service:
        reply = await service.client.post("/v1/completions", content=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "model"


async def test_gzip_body_is_decoded_before_it_is_routed() -> None:
    async with serving(entry("a"), entry("b")) as service:
        body = json.dumps({"model": "b"}).encode()
        headers = {"content-encoding": "gzip"}
        said = (await service.client.post("/x", content=gzip.compress(body), headers=headers)).json()
        assert (said["child"], said["body"]) == ("b", body.decode())
        assert "content-encoding" not in said["headers"]


async def test_huge_body_is_413_and_loads_nothing() -> None:
    async with serving(entry("a"), config=ServerConfig(max_request_bytes=4096), default="a") as service:
        reply = await service.ask("a", prompt="x" * 5000)
        assert reply.status_code == 413
        assert service.starter.num_starts == {}


async def test_stream_arrives_piece_by_piece() -> None:
    async with serving(entry("a")) as service, service.client.stream("POST", "/x", json=stream("a")) as reply:
        pieces = reply.aiter_bytes()
        for piece in (b"data: 1\n\n", b"data: 2\n\n"):
            service.child("a").pieces.put_nowait(piece)
            assert await anext(pieces) == piece  # before the next one is sent
        service.child("a").pieces.put_nowait(None)
        assert [piece async for piece in pieces] == []


def stream(model: str, media_type: str = SSE) -> dict[str, str]:
    return {"model": model, "stream": media_type}


async def test_client_that_leaves_a_stream_ends_it_everywhere() -> None:
    async with serving(entry("a")) as service:
        async with service.client.stream("POST", "/x", json=stream("a")) as reply:
            service.child("a").pieces.put_nowait(b"data: 1\n\n")
            await anext(reply.aiter_bytes())
        async with asyncio.timeout(300):
            await service.child("a").disconnected.wait()
        await service.until(lambda: not service.router.state("a").running)


async def test_client_that_leaves_while_waiting_is_forgotten() -> None:
    async with serving(entry("a")) as service:
        service.starter.holds.add("a")
        leaving = asyncio.create_task(service.ask("a"))
        await service.until(lambda: service.router.state("a").waiting and "a" in service.starter.children)
        leaving.cancel()
        await service.until(lambda: not service.router.state("a").waiting)
        service.child("a").may_start.set()
        await service.until(lambda: service.status("a") == "loaded")
        assert service.child("a").requests == []


async def test_slow_reader_holds_back_the_model() -> None:
    async with serving(entry("a")) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1024)
        body = json.dumps(stream("a", "text/plain")).encode()
        writer.write(
            b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await reader.readline()
        child, num_pieces = service.child("a"), 1024
        for _ in range(num_pieces):
            child.pieces.put_nowait(b"x" * 65536)
        num_sent = -1
        while child.num_sent > num_sent:  # until it sends no more
            num_sent = child.num_sent
            await asyncio.sleep(0.5)
        assert num_sent < num_pieces * 65536 // 2
        writer.transport.abort()
        async with asyncio.timeout(300):
            await child.disconnected.wait()


async def test_idle_model_makes_room_and_one_in_use_does_not() -> None:
    async with serving(entry("a"), entry("b"), entry("c"), limits={"turn_s": 0.0}) as service:
        async with service.client.stream("POST", "/x", json=stream("a")) as reply:
            assert (await service.ask("b")).json()["child"] == "b"
            assert (await service.ask("c")).json()["child"] == "c"  # b made room
            assert [service.status(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]
            service.child("a").pieces.put_nowait(b"data: 1\n\n")
            service.child("a").pieces.put_nowait(None)
            assert await reply.aread() == b"data: 1\n\n"
        assert (await service.ask("b")).json()["child"] == "b"  # a was used before c
        assert service.status("a") == "unloaded" or service.status("c") == "unloaded"


async def test_request_waits_for_a_model_in_use_then_gets_its_turn() -> None:
    async with serving(entry("a"), entry("b"), memory=4 * MIB, limits={"turn_s": 0.0}) as service:
        async with service.client.stream("POST", "/x", json=stream("a")) as reply:
            waiting = asyncio.create_task(service.ask("b"))
            await service.until(lambda: service.router.state("b").waiting)
            later = asyncio.create_task(service.ask("a"))
            await service.until(lambda: service.router.state("a").waiting)
            service.child("a").pieces.put_nowait(None)
            await reply.aread()
        assert (await waiting).json()["child"] == "b"
        assert (await later).json()["child"] == "a"
        assert service.starter.num_starts == {"a": 2, "b": 1}


async def test_request_that_waits_too_long_is_503_with_retry_after() -> None:
    async with serving(entry("b"), limits={"wait_timeout_s": 0.3}) as service:
        service.starter.holds.add("b")
        refused = await service.ask("b")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "'b' is loading and was not available within" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("media_type", "end"),
    [
        (SSE, '\n\ndata: {"error":{"message":"the server of the model \'a\' has ended; try again"'),
        (
            "application/x-ndjson",
            '\n{"error":{"message":"the server of the model \'a\' has ended; try again"',
        ),
    ],
)
async def test_stream_of_a_dead_model_ends_in_an_error(media_type: str, end: str) -> None:
    async with serving(entry("a")) as service:
        async with service.client.stream("POST", "/x", json=stream("a", media_type)) as reply:
            service.child("a").pieces.put_nowait(b"data: 1")
            pieces = reply.aiter_text()
            assert await anext(pieces) == "data: 1"
            service.child("a").kill()
            assert "".join([piece async for piece in pieces]).startswith(end)
        assert (await service.ask("a")).json()["child"] == "a"  # restarted
        assert service.starter.num_starts == {"a": 2}


async def test_body_of_a_dead_model_ends_incomplete() -> None:
    async with (
        serving(entry("a")) as service,
        service.client.stream("POST", "/x", json=stream("a", "text/plain")) as reply,
    ):
        service.child("a").pieces.put_nowait(b"half")
        pieces = reply.aiter_bytes()
        assert await anext(pieces) == b"half"
        service.child("a").kill()
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(pieces)


async def test_death_costs_its_model_only() -> None:
    async with (
        serving(entry("a"), entry("b")) as service,
        service.client.stream("POST", "/x", json=stream("a")) as reply,
    ):
        await service.ask("b")
        service.child("b").kill()
        await service.until(lambda: service.status("b") == "unloaded")
        service.child("a").pieces.put_nowait(b"data: 1\n\n")
        service.child("a").pieces.put_nowait(None)
        assert await reply.aread() == b"data: 1\n\n"


async def test_failed_load_says_why_and_others_are_served() -> None:
    async with serving(entry("a"), entry("b")) as service:
        service.starter.fails["a"] = "no weights"
        refused = await service.ask("a")
        assert refused.status_code == 503
        assert "the model 'a' failed: no weights; it is tried again in" in refused.json()["error"]["message"]
        assert (await service.ask("b")).status_code == 200
        (card,) = [one for one in (await service.client.get("/v1/models")).json()["data"] if one["id"] == "a"]
        assert card["status"]["value"] == "unloaded"
        assert (card["status"]["state"], card["status"]["failed"]) == ("failed", True)
        assert card["status"]["error"] == "no weights"
        service.starter.fails.clear()
        assert (await service.client.post("/models/load", json={"model": "a"})).json() == {"success": True}
        await service.until(lambda: service.status("a") == "loaded")


async def test_model_sleeps_to_make_room_and_wakes() -> None:
    async with serving(*(entry(name, sleep=True) for name in "ab"), memory=8 * MIB - 1) as service:
        await service.ask("a")
        await service.ask("b")
        assert [service.status(name) for name in "ab"] == ["sleeping", "loaded"]
        assert (await service.ask("a")).json()["child"] == "a"
        assert [service.status(name) for name in "ab"] == ["loaded", "sleeping"]
        assert service.child("a").controls == ["/sleep?level=1&mode=wait", "/wake_up"]
        assert service.starter.num_starts == {"a": 1, "b": 1}


async def test_model_that_cannot_sleep_is_unloaded() -> None:
    async with serving(*(entry(name, sleep=True) for name in "ab"), memory=8 * MIB - 1) as service:
        await service.ask("a")
        service.child("a").can_sleep = False
        await service.ask("b")
        assert service.child("a").controls == ["/sleep?level=1&mode=wait"]
        assert [service.status(name) for name in "ab"] == ["unloaded", "loaded"]


async def test_model_that_does_not_wake_is_started_anew() -> None:
    async with serving(*(entry(name, sleep=True) for name in "ab"), memory=8 * MIB - 1) as service:
        await service.ask("a")
        await service.ask("b")
        service.child("a").can_sleep = False
        refused = await service.ask("a")
        assert refused.status_code == 503
        assert "it did not wake" in refused.json()["error"]["message"]
        service.router.load("a")
        assert (await service.ask("a")).json()["child"] == "a"


async def test_models_are_loaded_and_unloaded_by_llama_cpp_routes() -> None:
    async with serving(entry("a"), entry("b", pinned=True)) as service:
        await service.until(lambda: service.status("b") == "loaded")
        async with service.client.stream("GET", "/models/sse") as reply:
            lines = reply.aiter_lines()
            assert (await states(lines, 2)) == [("a", "unloaded"), ("b", "loaded")]
            await service.client.post("/models/load", json={"model": "a"})
            assert await states(lines, 2) == [("a", "loading"), ("a", "loaded")]
            await service.client.post("/models/unload", json={"model": "a"})
            assert await states(lines, 2) == [("a", "unloading"), ("a", "unloaded")]
        refused = await service.client.post("/models/unload", json={"model": "b"})
        assert refused.status_code == 409
        assert (await service.client.post("/models/load", json={"model": "x"})).status_code == 404
        assert (await service.client.post("/models/load", content=b"?")).status_code == 400


async def states(lines: Any, count: int) -> list[tuple[str, str]]:
    found = []
    while len(found) < count:
        line = await anext(lines)
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            found.append((event["model"], event["data"]["state"]))
    return found


async def test_autoload_can_be_switched_off() -> None:
    settings = ModelRouterConfig(models_autoload=False)
    async with serving(entry("a"), settings=settings) as service:
        refused = await service.ask("a")
        assert refused.status_code == 503
        assert "POST /models/load" in refused.json()["error"]["message"]
        service.router.load("a")
        await service.until(lambda: service.status("a") == "loaded")
        assert (await service.ask("a")).status_code == 200
    async with serving(entry("a")) as service:
        assert (await service.client.post("/x?autoload=false", json={"model": "a"})).status_code == 503


async def test_ollama_lists_keeps_and_unloads() -> None:
    async with serving(entry("a", aliases=("x",)), entry("b")) as service:
        tags = (await service.client.get("/api/tags")).json()["models"]
        assert [one["name"] for one in tags] == ["a", "x", "b"]
        assert (await service.client.get("/api/ps")).json() == {"models": []}
        await service.client.post("/api/generate", json={"model": "a", "keep_alive": "10m"})
        (loaded,) = (await service.client.get("/api/ps")).json()["models"]
        assert (loaded["name"], loaded["size"]) == ("a", 4 * MIB)
        assert loaded["expires_at"] < "9999"
        reply = await service.client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert (reply.json()["done_reason"], reply.json()["response"]) == ("unload", "")
        await service.until(lambda: service.status("a") == "unloaded")
        reply = await service.client.post(
            "/api/chat", json={"model": "b", "messages": [1], "keep_alive": "0s"}
        )
        assert reply.json()["child"] == "b"
        await service.until(lambda: service.status("b") == "unloaded")
        reply = await service.client.post("/api/chat", json={"model": "a", "keep_alive": "soon"})
        assert reply.status_code == 400
        assert "keep_alive must be seconds" in reply.json()["error"]


@folded(
    ("keep_alive", "outcome"),
    [
        (-1, "stays"),
        ("-1m", "stays"),
        ("5m", "expires"),
        (300, "expires"),
        (0, "unloaded"),
        ("0", "unloaded"),
    ],
)
async def test_ollamas_keep_alive_in_every_form(keep_alive: object, outcome: str) -> None:
    async with serving(entry("a")) as service:
        body = {"model": "a", "prompt": "x", "keep_alive": keep_alive}
        assert (await service.client.post("/api/generate", json=body)).status_code == 200
        if outcome == "unloaded":
            await service.until(lambda: service.status("a") == "unloaded")
            return
        (loaded,) = (await service.client.get("/api/ps")).json()["models"]
        assert (loaded["expires_at"] == FOREVER) == (outcome == "stays")


async def test_malformed_keep_alive_loads_nothing() -> None:
    async with serving(entry("a")) as service:
        for keep_alive in ("abc", "", "5 m", True, [], {}):
            body = {"model": "a", "prompt": "x", "keep_alive": keep_alive}
            reply = await service.client.post("/api/generate", json=body)
            assert reply.status_code == 400
            assert "keep_alive must be seconds" in reply.json()["error"]
        assert service.starter.num_starts == {}


async def test_reload_serves_new_models_and_ends_old_ones() -> None:
    async with serving(entry("a"), entry("b", aliases=("x",))) as service:
        async with service.client.stream("POST", "/x", json=stream("b")) as reply:
            service.write(entry("a"), entry("c"))
            listed = await service.client.post("/models/reload")
            assert [one["id"] for one in listed.json()["data"]] == ["a", "c"]
            assert (await service.ask("x")).status_code == 404
            assert (await service.ask("c")).json()["child"] == "c"
            service.child("b").pieces.put_nowait(b"data: 1\n\n")
            service.child("b").pieces.put_nowait(None)
            assert await reply.aread() == b"data: 1\n\n", "what runs goes on"
        await service.until(lambda: list(service.router.planner.models) == ["a", "c"])
        assert await service.child("b").ended()


async def test_reload_restarts_models_whose_flags_have_changed() -> None:
    options = {"max-num-seqs": 4}
    async with serving(entry("a"), entry("b"), entry("idle"), memory=16 * MIB) as service:
        for name in "ab":
            await service.ask(name)
        service.write(entry("a", options=options), entry("b", keep_alive_s=60.0), entry("idle", pinned=True))
        listed = await service.client.get("/models?reload=1")
        assert [one["id"] for one in listed.json()["data"]] == ["a", "b", "idle"]
        await service.until(lambda: "idle" in service.starter.children)
        assert (await service.ask("a")).status_code == 200
        assert service.child("a").flags["max-num-seqs"] == 4
        assert service.starter.num_starts == {"a": 2, "b": 1, "idle": 1}
        assert service.router.state("b").expires_at < float("inf")


async def test_reload_of_a_garbled_file_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(entry("a"), entry("b")) as service:
        await service.ask("a")
        service.garble(ConfigError("--models /secret/models.yaml, line 2: unknown key 'modell'"))
        for method, path in (("POST", "/models/reload"), ("GET", "/models?reload=1")):
            reply = await service.client.request(method, path)
            assert reply.status_code == 409
            assert "/secret" not in reply.text
        assert "line 2: unknown key 'modell'" in caplog.text
        assert [(await service.ask(name)).status_code for name in "ab"] == [200, 200]
        assert service.starter.num_starts == {"a": 1, "b": 1}
        service.write(entry("b"), entry("new"))
        assert (await service.client.post("/models/reload")).status_code == 200
        assert (await service.ask("new")).json()["child"] == "new"


async def test_reload_is_for_the_admin_key_and_brings_new_keys() -> None:
    async with serving(entry("a"), config=KEYS) as service:
        service.write(entry("a", api_keys=(hashed("mine"),)))
        refused = await service.client.post("/models/reload", headers=bearer("shared"))
        assert refused.status_code == 401
        assert (await service.client.post("/models/reload", headers=bearer("admin"))).status_code == 200
        for key, status in {"shared": 401, "mine": 200}.items():
            reply = await service.client.post("/x", json={"model": "a"}, headers=bearer(key))
            assert reply.status_code == status


async def test_front_page_is_the_console_for_browsers() -> None:
    async with serving(entry("a")) as service:
        page = await service.client.get("/", headers={"accept": "text/html"})
        assert "console/console.js" in page.text
        assert "content-security-policy" in (await service.client.get("/console/console.js")).headers
        assert (await service.client.get("/")).json()
        assert service.starter.num_starts == {}


async def test_probes_load_nothing_and_do_not_count_as_use() -> None:
    async with serving(entry("a"), default="a") as service:
        for path in ("/health", "/readyz", "/livez", "/version", "/", "/api/version"):
            assert (await service.client.get(path)).status_code == 200
        refused = await service.client.get("/metrics?model=a")
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the model 'a' is unloaded"
        assert service.starter.num_starts == {}
        await service.ask("a")
        used = service.router.state("a").last_used
        assert (await service.client.get("/metrics?model=a")).json()["path"] == "/metrics"
        assert service.router.state("a").last_used == used
        text = (await service.client.get("/metrics")).text
        assert 'quire:router_model_state{model_name="a",state="loaded"} 1.0' in text
        assert 'quire:router_loads_total{model_name="a",outcome="loaded"} 1.0' in text


KEYS = ServerConfig(api_key=("shared",), admin_api_key="admin")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@folded(
    ("key", "model", "status"),
    [
        ("shared", "open", 200), ("shared", "own", 401), ("mine", "own", 200), ("mine", "open", 401),
        ("none", "open", 401), ("admin", "own", 200), ("admin", "open", 200),
    ],
)  # fmt: skip
async def test_model_with_own_keys_takes_these_only(key: str, model: str, status: int) -> None:
    models = entry("open"), entry("own", api_keys=(hashed("mine"),))
    async with serving(*models, config=KEYS) as service:
        reply = await service.client.post("/x", json={"model": model}, headers=bearer(key))
        assert reply.status_code == status
        if key == "admin":
            assert reply.json()["headers"]["authorization"] == "Bearer child-admin"
        elif status == 200:
            assert reply.json()["headers"]["authorization"] == f"Bearer {key}"
        assert service.starter.num_starts == ({model: 1} if status == 200 else {})


def hashed(key: str) -> str:
    return ServerConfig(api_key=(key,)).api_key[0]


async def test_foreign_page_is_refused_unless_all_models_have_keys() -> None:
    models = entry("open"), entry("own", api_keys=(hashed("mine"),))
    headers = {"host": "attacker.example"}
    async with serving(*models) as service:
        assert (await service.client.get("/v1/models", headers=headers)).status_code == 403
    async with serving(*models, config=KEYS) as service:
        reply = await service.client.get("/v1/models", headers={**headers, **bearer("mine")})
        assert reply.status_code == 200


async def test_lists_show_a_key_what_it_may_use() -> None:
    models = entry("open"), entry("own", api_keys=(hashed("mine"),))
    async with serving(*models, config=KEYS) as service:
        for key, names in {"shared": ["open"], "mine": ["open", "own"], "admin": ["open", "own"]}.items():
            reply = await service.client.get("/v1/models", headers=bearer(key))
            assert [one["id"] for one in reply.json()["data"]] == names
        assert (await service.client.get("/v1/models")).status_code == 401
        assert (await service.client.get("/metrics")).status_code == 401
        assert (await service.client.get("/health")).status_code == 200
        for path in ("/v1/models/own", "/models/unload"):
            method = "POST" if "unload" in path else "GET"
            reply = await service.client.request(
                method, path, json={"model": "own"}, headers=bearer("shared")
            )
            assert reply.status_code == 401


async def test_server_is_given_its_keys_and_the_routers_limits() -> None:
    models = entry("open", options={"max-num-seqs": 4}), entry("own", api_keys=(hashed("mine"),))
    async with serving(*models, config=KEYS) as service:
        await service.client.post("/x", json={"model": "open"}, headers=bearer("admin"))
        await service.client.post("/x", json={"model": "own"}, headers=bearer("admin"))
        flags = service.child("open").flags
        assert flags["api-key"] == [hashed("shared")]
        assert service.child("own").flags["api-key"] == [hashed("mine")]
        assert (flags["max-num-seqs"], flags["max-model-len"]) == (4, "auto")
        assert (flags["model"], flags["kv-cache-memory-bytes"]) == ("path/to/open", MIB)
        assert flags["max-request-bytes"] == KEYS.max_request_bytes


async def test_limit_of_a_models_requests_is_429() -> None:
    async with (
        serving(entry("a", max_requests=1)) as service,
        service.client.stream("POST", "/x", json=stream("a")) as reply,
    ):
        refused = await service.ask("a")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        service.child("a").pieces.put_nowait(None)
        await reply.aread()


async def test_state_of_a_server_is_the_routers_alone() -> None:
    async with serving(entry("a"), default="a") as service:
        assert (await service.client.post("/sleep?level=1")).status_code == 409


async def test_models_in_anthropics_form() -> None:
    async with serving(entry("a"), entry("b")) as service:
        headers = {"anthropic-version": "2023-06-01"}
        reply = (await service.client.get("/v1/models?limit=1", headers=headers)).json()
        assert ([one["id"] for one in reply["data"]], reply["has_more"]) == (["a"], True)
        missing = await service.client.get("/v1/models/c", headers=headers)
        assert missing.json()["error"]["type"] == "not_found_error"


async def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    async with (
        serving(entry("a"), entry("b")) as service,
        service.client.stream("POST", "/x", json=stream("a")) as reply,
    ):
        service.starter.holds.add("b")
        waiting = asyncio.create_task(service.ask("b"))
        await service.until(lambda: service.router.state("b").waiting)
        service.app.draining = True
        service.router.drain()
        assert (await waiting).status_code == 503
        assert (await service.ask("a")).status_code == 503
        assert (await service.client.get("/readyz")).status_code == 503
        assert (await service.client.get("/livez")).status_code == 200
        service.child("a").pieces.put_nowait(b"data: 1\n\n")
        service.child("a").pieces.put_nowait(None)
        assert await reply.aread() == b"data: 1\n\n"


async def test_many_clients_of_many_models_are_all_served() -> None:
    """Room for two of three: every request is answered by its own model, in the end."""
    limits = {"turn_s": 0.05}
    async with serving(*map(entry, "abc"), memory=8 * MIB, limits=limits) as service:

        async def ask(which: int) -> None:
            for turn in range(5):
                model = "abc"[(which + turn) % 3]
                reply = await service.ask(model)
                assert (reply.status_code, reply.json()["child"]) == (200, model)

        await asyncio.gather(*map(ask, range(6)))
        await service.until(lambda: not any(service.router.state(name).running for name in "abc"))
