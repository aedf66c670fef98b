# SPDX-License-Identifier: Apache-2.0
"""Requests in the forms in which browsers, proxies and scripts send them."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for, live_server
from tests.fixtures.folded import folded

PATH = "/v1/completions"
BODY = b'{"prompt": "hi"}'
JSON = {"content-type": "application/json"}
GZIP = {**JSON, "content-encoding": "gzip"}
ORIGIN = "http://a.test"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/fake-model", "/version", "/metrics"])
async def test_head_is_get_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    get, head = await client.get(path), await client.head(path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type" if path != "/health" else "content-length"]
    assert (await client.head("/nowhere")).status_code == 404
    assert (await client.head(PATH)).status_code == 405


async def test_head_over_a_connection_that_goes_on(engine: FakeEngine) -> None:
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        for _ in range(2):
            head = await client.head("/v1/models")
            assert (head.status_code, head.content) == (200, b"")
            assert int(head.headers["content-length"]) == len((await client.get("/v1/models")).content)
        metrics = (await client.get("/metrics")).text
    assert 'quire:http_requests_total{handler="/v1/models",method="HEAD",status="200"} 2.0' in metrics


async def test_models_with_a_slash_behind_are_the_list(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()


async def test_preflight_of_openai_js() -> None:
    headers = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-arch,x-stainless-retry-count",
    }
    async with client_for(FakeEngine(), allowed_origins=(ORIGIN,)) as client:
        preflight = await client.options("/v1/chat/completions", headers=headers)
        assert preflight.status_code == 200
        assert "x-stainless-retry-count" in preflight.headers["access-control-allow-headers"]
        foreign = await client.options(PATH, headers={**headers, "origin": "http://b.test"})
        assert foreign.status_code == 400
        answer = await client.post(PATH, json={"prompt": "hi"}, headers={"origin": ORIGIN})
    exposed = answer.headers["access-control-expose-headers"]
    assert "x-request-id" in exposed
    assert "x-quire-ignored-fields" in exposed


async def test_bodies_may_have_a_byte_order_mark(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, content=b"\xef\xbb\xbf" + BODY, headers=JSON)).status_code == 200


@pytest.mark.parametrize(
    "declared",
    [None, "text/plain; charset=utf-8", "application/octet-stream", "application/x-www-form-urlencoded"],
)
async def test_bodies_may_be_undeclared_but_not_from_a_page(
    client: httpx.AsyncClient, declared: str | None
) -> None:
    headers = {} if declared is None else {"content-type": declared}
    assert (await client.post(PATH, content=BODY, headers=headers)).status_code == 200
    for of_a_browser in (
        {"origin": "http://evil.test"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ):
        from_a_page = await client.post(PATH, content=BODY, headers=headers | of_a_browser)
        assert from_a_page.status_code == 415


@pytest.mark.parametrize("num_chars", [1, 1000, 3000])
async def test_gzip_bodies(client: httpx.AsyncClient, engine: FakeEngine, num_chars: int) -> None:
    body = gzip.compress(json.dumps({"prompt": "ab" * (num_chars // 2) or "a"}).encode())
    response = await client.post(PATH, content=body, headers=GZIP)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == max(1, num_chars)


async def test_gzip_bodies_may_come_in_any_pieces(client: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for byte in gzip.compress(BODY):
            yield bytes([byte])

    assert (await client.post(PATH, content=pieces(), headers=GZIP)).status_code == 200


@pytest.mark.item(8)
async def test_gzip_body_is_bounded_by_its_decoded_size(engine: FakeEngine) -> None:
    bomb = gzip.compress(bytes(100 * 2**20))
    assert len(bomb) < 2**20
    async with client_for(engine, max_request_bytes=2**20) as client:
        response = await client.post(PATH, content=bomb, headers=GZIP)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "PayloadTooLargeError")


async def test_gzip_body_is_bounded_by_its_encoded_size(engine: FakeEngine) -> None:
    num_sent = 0

    async def nothing_for_ever() -> AsyncIterator[bytes]:
        nonlocal num_sent
        yield gzip.compress(b"")[:10]
        while True:
            num_sent += 1
            assert num_sent < 100, "the server reads on past the limit"
            yield b"\x00\x00\x00\xff\xff" * 100  # stored blocks of no bytes

    async with client_for(engine, max_request_bytes=10_000) as client:
        response = await client.post(PATH, content=nothing_for_ever(), headers=GZIP)
    assert response.status_code == 413


@folded(
    "body",
    [
        b"", BODY, gzip.compress(BODY)[:-1], gzip.compress(BODY)[:5], gzip.compress(BODY) + b"x",
        gzip.compress(BODY)[:-8] + bytes(8),
    ],
    ids=["empty", "not compressed", "short of a byte", "header alone", "followed by more", "wrong checksum"],
)  # fmt: skip
async def test_broken_gzip_bodies(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post(PATH, content=body, headers=GZIP)
    assert response.status_code == 400
    assert "gzip" in response.json()["error"]["message"]


@pytest.mark.item(9)
async def test_two_statements_of_a_bodys_length_are_refused(engine: FakeEngine) -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 4\r\n"
        b"transfer-encoding: chunked\r\n\r\n10\r\n" + BODY + b"\r\n0\r\n\r\n"
    )
    async with live_server(engine) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.getsockname()[1])
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in answer.lower()
    assert not engine.seen


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("DELETE", "/ping", "GET, HEAD, POST"), ("POST", "/v1/models", "GET, HEAD"), ("GET", PATH, "POST")],
)
async def test_405_names_every_method_of_the_path(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    response = await client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert method == "HEAD" or f"This path takes {allowed}, not {method}." in response.text


async def test_note_on_a_nameless_field_does_not_break_the_response(engine: FakeEngine) -> None:
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.post(PATH, json={"prompt": "hi", "a b": 1, "": 2})
    assert (answer.status_code, answer.headers["x-quire-ignored-fields"]) == (200, "?, ?")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions? "),
        ("/v1/chat/completion", "did you mean /v1/chat/completions? "),
        ("/api/create", None),
        ("/infill/that/nobody/knows", ""),
        (f"/{'x' * 2000}", ""),
    ],
)
async def test_unknown_path_names_itself_and_similar_paths(
    client: httpx.AsyncClient, path: str, hint: str | None
) -> None:
    reply = await client.post(path, json={})
    assert reply.status_code == 404
    if hint is None:
        assert reply.json()["error"].startswith(
            "/api/create does not exist here: models come from Hugging Face"
        )
    else:
        there_is = f"There is nothing at {path[:80]}; {hint}GET / lists all paths."
        assert reply.json()["error"]["message"] == there_is
    assert (await client.get("/")).status_code == 200
