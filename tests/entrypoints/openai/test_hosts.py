# SPDX-License-Identifier: Apache-2.0
"""Requests with the host of another server, or with an ambiguous head, are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.config import ServerConfig
from quire.entrypoints.openai.middleware.allowed_hosts import AllowedHosts
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import LiveServer, live_server
from tests.fixtures.folded import folded

OURS = (
    *(
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "app.localhost:1",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.0.0.2",
    ),
    *("[::1]", "[::1]:8000", "::1", "192.168.1.5:80", "[fe80::1%25eth0]:8000", "10.0.0.1.:5"),
)
FOREIGN = (
    *(
        "evil.com",
        "evil.com:8000",
        "EVIL.com.",
        "quire",
        "localhost.evil.com",
        "127.0.0.1.nip.io",
        "evil-localhost",
    ),
    *(
        "localhost:80@evil.com",
        "evil.com@localhost",
        "localhost/evil",
        "[::1].evil.com",
        "",
        "127.0.0.1:80:evil.com",
    ),
    *("2130706433", "0x7f.1", "localhost..", "host.docker.internal", "127.0.0.1:port", "localhost evil.com"),
)


def refuses(
    given: str, *, has_keys: bool = False, local: str = "127.0.0.1", target: str = "/", **options: Any
) -> bool:
    hosts = AllowedHosts(ServerConfig(**options), has_keys=has_keys)
    headers = [(b"host", given.encode("latin-1"))]
    scope = {"server": (local, 8000), "headers": headers, "raw_path": target.encode()}
    return hosts.refused(scope) is not None


@folded("host", OURS)
def test_host_address_or_localhost_is_allowed(host: str) -> None:
    assert not refuses(host)
    assert not refuses(host, allowed_hosts=("a.test",))


@folded("host", FOREIGN)
def test_host_of_another_name_is_refused(host: str) -> None:
    assert refuses(host)
    assert refuses(host, local="::1", host="::1")
    assert refuses(host, allowed_hosts=("a.test",), has_keys=True, host="0.0.0.0", local="10.0.0.1")


@given(host=st.text(st.characters(max_codepoint=255), max_size=20))
@example(host="evil.com")
def test_host_unaffected_with_keys_or_on_a_network(host: str) -> None:
    assert not refuses(host, has_keys=True)
    assert not refuses(host, host="0.0.0.0", local="10.0.0.1")
    assert not refuses(host, host="my-machine", local="10.0.0.1")
    assert not refuses(host, allowed_hosts=("*",))


@given(host=st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8}){0,3}", fullmatch=True))
def test_host_that_is_a_name_is_refused_unless_named(host: str) -> None:
    is_local = host.split(".")[-1] == "localhost"
    assert refuses(host) != is_local
    assert not refuses(host, allowed_hosts=(host,))
    assert not refuses(host.upper() + ".:80", allowed_hosts=(host,))


def test_host_wildcard_allows_names_below_it() -> None:
    assert not refuses("a.b.example.com:80", allowed_hosts=("*.example.com",))
    assert refuses("example.com", allowed_hosts=("*.example.com",))
    assert refuses("badexample.com", allowed_hosts=("*.example.com",))


def test_host_in_the_target_is_checked_too() -> None:
    assert refuses("localhost", target="http://evil.com/v1/models")
    assert not refuses("localhost", target="http://localhost:8000/v1/models")
    assert not refuses("localhost", target="*")


def test_host_that_the_server_was_bound_to_is_allowed() -> None:
    assert not refuses("my-machine:8000", host="my-machine")


async def answered(server: LiveServer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.getsockname()[1])
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


END = b"Connection: close\r\n\r\n"


@pytest.mark.item(9)
@folded(
    ("head", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: evil.com:8000\r\nOrigin: http://evil.com:8000\r\n", 403),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.com\r\n", 403),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET /v1/models HTTP/1.0\r\n", 200),
        (b"GET /v1/models HTTP/1.1\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n", 400),
        (b"GET http://evil.com/v1/models HTTP/1.1\r\nHost: localhost\r\n", 403),
        (b"GET /v1/models HTTP/2.0\r\nHost: localhost\r\n", 505),
        (b"GET /v1/models HTTP/0.9\r\nHost: localhost\r\n", 505),
        (b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding:\r\n chunked\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-A: 1\r\n\t2\r\n", 400),
        (b"GET /v1/models HTTP/1.1\nHost: localhost\nX-A: 1\n 2\n", 400),
    ],
    ids=lambda value: value[:70].decode() if isinstance(value, bytes) else str(value),
)
async def test_head_for_another_or_ambiguous_is_refused(head: bytes, status: int) -> None:
    engine = FakeEngine()
    async with live_server(engine) as server:
        answer = await answered(server, head + END)
    assert int(answer.split()[1]) == status, answer
    assert status == 200 or b"connection: close" in answer.lower()


async def test_fold_in_a_second_or_split_head_is_refused() -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    folded = b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n"
    async with live_server(FakeEngine()) as server:
        both = await answered(server, whole + b"\r\n" + folded)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.getsockname()[1])
        for byte in folded[: folded.index(b"\r\n ") + 3]:  # the answer comes at the fold
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        split = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert [line for line in both.split(b"\r\n") if line.startswith(b"HTTP/1.1")] == [
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 400 Bad Request",
    ]
    assert split.startswith(b"HTTP/1.1 400")


async def test_folds_in_a_body_are_no_folds() -> None:
    body = b'{"prompt":\n "hi",\n\t"max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with live_server(FakeEngine()) as server:
        answer = await answered(server, head + b"Content-Length: %d\r\n" % len(body) + END + body)
    assert answer.startswith(b"HTTP/1.1 200"), answer
