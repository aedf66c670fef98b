# SPDX-License-Identifier: Apache-2.0
"""Fetching: hosts that the operator names, addresses that were checked, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from quire.errors import ValidationError
from quire.multimodal.door import fetch as fetch_module
from quire.multimodal.door import sources
from quire.multimodal.door.fetch import checked_address, checked_target, fetch, is_public
from tests.fixtures.folded import folded

WHERE = "messages.0.content.0"
Answer = Callable[[str], bytes]


def ok(body: bytes, *headers: str) -> bytes:
    head = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def redirect(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def host(answer: Answer) -> AsyncIterator[tuple[str, list[str]]]:
    """A host on this machine; yields its authority and the requests that it gets."""
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        seen.append(request)
        writer.write(answer(request.split()[1]))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


async def test_a_named_host_is_fetched() -> None:
    async with host(lambda path: ok(b"image")) as (name, seen):
        assert await fetch(f"HTTP://{name}/a.png?x=1", [name], WHERE) == b"image"
    (request,) = seen
    assert request.startswith("GET /a.png?x=1 HTTP/1.1\r\n")
    lowered = request.lower()
    assert f"host: {name}\r\n" in lowered
    assert "cookie" not in lowered
    assert "authorization" not in lowered


async def test_a_chunked_answer_is_read() -> None:
    body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nima\r\n2\r\nge\r\n0\r\n\r\n"
    async with host(lambda path: body) as (name, _):
        assert await fetch(f"http://{name}/", [name], WHERE) == b"image"


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    async with host(lambda path: ok(b"image")) as (name, _):
        assert await fetch(f"http://{name}/", [name], WHERE) == b"image"


async def test_a_redirect_within_named_hosts_is_followed() -> None:
    async with host(lambda path: ok(b"image") if path == "/b" else redirect("/b")) as (name, seen):
        assert await fetch(f"http://{name}/a", [name], WHERE) == b"image"
    assert len(seen) == 2


@pytest.mark.parametrize(
    "to",
    ["http://127.0.0.1:{other}/", "http://localhost:{other}/", "http://169.254.169.254/", "//10.0.0.1/", "file:///etc/passwd"],
)  # fmt: skip
async def test_a_redirect_elsewhere_is_refused(to: str) -> None:
    async with host(lambda path: ok(b"secret")) as (inner, reached):
        other = inner.rpartition(":")[2]
        async with host(lambda path: redirect(to.format(other=other))) as (name, _):
            with pytest.raises(ValidationError):
                await fetch(f"http://{name}/", [name], WHERE)
    assert reached == []


async def test_redirects_without_end_are_refused() -> None:
    async with host(redirect) as (name, seen):
        with pytest.raises(ValidationError, match="more than 3 times"):
            await fetch(f"http://{name}/", [name], WHERE)
    assert len(seen) == 4


BAD_ANSWERS = {
    "status": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", "status 304"),
    "redirect without place": (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "status 302"),
    "compressed": (ok(b"x", "Content-Encoding: gzip"), "compressed"),
    "no protocol": (b"SSH-2.0-x\r\n", "RemoteProtocolError"),
    "cut off": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", "RemoteProtocolError"),
    "nothing": (b"", "could not be fetched"),
    "said to be large": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", "more than 1000 bytes"),
    "large": (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001, "more than 1000 bytes"),
    "long head": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**18, "RemoteProtocolError"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_a_bad_answer_is_refused_in_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, words = BAD_ANSWERS[name]
    monkeypatch.setattr(fetch_module, "MAX_ITEM_BYTES", 1000)
    async with host(lambda path: answer) as (authority, _):
        with pytest.raises(ValidationError, match=words):
            await fetch(f"http://{authority}/", [authority], WHERE)


async def test_a_host_that_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "LIMIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValidationError, match=r"within 0\.05 s"):
            await fetch(f"http://{name}/", [name], WHERE)


async def test_a_closed_port_is_an_error_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        name = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ValidationError, match="ConnectionRefusedError"):
        await fetch(f"http://{name}/", [name], WHERE)


ALLOWED = ["images.example.com", "cdn.example.com:8080", "10.1.2.3", "[::1]:81"]


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com/a",
        "https://IMAGES.example.com:443/a",
        "http://cdn.example.com:8080/",
        "http://10.1.2.3",
        "http://[::1]:81/x",
    ],
)
def test_named_hosts_are_allowed(url: str) -> None:
    assert checked_target(url, ALLOWED, WHERE).path.startswith("/")


@folded(
    "url",
    [
        "http://evil.com/",
        "http://images.example.com.evil.com/",
        "http://evil.com/images.example.com",
        "http://sub.images.example.com/",
        "http://images.example.com:8080/",
        "http://cdn.example.com/",
        "http://images.example.com@evil.com/",
        "http://images.example.com:80@evil.com/",
        "http://images.example.com\\@evil.com/",
        "http://evil.com\\.images.example.com/",
        "http://evil.com#@images.example.com/",
        "http://images.example.com%2eevil.com/",
        "http://images.example.com./",
        "http://0x7f000001/",
        "http://2130706433/",
        "http://127.1/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::1/",
        "http://images.example.com:99999/",
        "http:///a",
        "http:images.example.com",
        "ftp://images.example.com/",
        "http://images.example.com/\r\nX: y",
        "http://images.example.com/a b",
        "http://imäges.example.com/",
        "http://images.example.com/" + "a" * 9000,
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        checked_target(url, ALLOWED, WHERE)


@folded(
    ("address", "expected"),
    [
        ("8.8.8.8", True), ("2606:4700:4700::1111", True), ("127.0.0.1", False), ("10.0.0.1", False),
        ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False), ("::", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:10.0.0.1", False), ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False), ("64:ff9b::7f00:1", False), ("2001:0:1::", False), ("ff02::1", False),
    ],
)  # fmt: skip
def test_private_addresses_are_not_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


class Resolver:
    """Answers of a name server, one after the other."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in self.answers.pop(0)]


async def test_every_address_of_a_name_must_be_public(monkeypatch: pytest.MonkeyPatch) -> None:
    target = checked_target("http://images.example.com/", ALLOWED, WHERE)
    for answer in (["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], []):
        resolver = Resolver(answer)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolver.getaddrinfo, raising=False)
        with pytest.raises(ValidationError, match="not public"):
            await checked_address(target, WHERE)


async def test_the_address_that_was_checked_is_dialed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to a private address when asked again changes nothing."""
    dialed = []

    async def dial(address: str, port: int, **_: Any) -> Any:
        dialed.append((address, port))
        raise ConnectionRefusedError

    resolver = Resolver(["8.8.8.8"], ["127.0.0.1"])
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolver.getaddrinfo, raising=False)
    monkeypatch.setattr(fetch_module.asyncio, "open_connection", dial)
    with pytest.raises(ValidationError):
        await fetch("http://images.example.com/", ALLOWED, WHERE)
    assert dialed == [("8.8.8.8", 80)]


def test_limits_of_data_are_checked_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_ITEM_BYTES", 30)
    monkeypatch.setattr(sources.base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    for url in ("data:image/png;base64," + "A" * 48, "data:image/png," + "A" * 31):
        with pytest.raises(ValidationError, match="the limit of one item is 30"):
            sources.read_data_url(url, WHERE)
