# SPDX-License-Identifier: Apache-2.0
"""Fetching of media from hosts that the operator names, over HTTP/1.1.

Invariant: the address that is dialed is one that was checked, so a name that resolves differently a moment later
changes nothing. It is public, unless the operator named an address or localhost itself. Every redirect is checked like
a first URL. No proxy, cookie or credential is used. Bytes and time are bounded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import urllib.parse
from collections.abc import Collection
from dataclasses import dataclass

import h11

from quire.errors import ValidationError
from quire.multimodal.door.sources import HTTP, MAX_ITEM_BYTES

LIMIT_S = 10.0
MAX_REDIRECTS = 3
MAX_URL_CHARS = 8192
REDIRECTS = (301, 302, 303, 307, 308)
DEFAULT_PORTS = {"http": 80, "https": 443}
CHUNK = 2**16
TRANSLATED = ipaddress.ip_network("64:ff9b::/32")  # IPv6 addresses that a gateway translates to IPv4 ones.


@dataclass(frozen=True)
class FetchTarget:
    """Checked URL: `path` has the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Host as a header has it, with a port that is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def checked_target(url: str, allowed: Collection[str], where: str) -> FetchTarget:
    """Return the parts of a URL whose host is allowed.

    Args:
        allowed: hosts, for the scheme's own port, or host:port.

    Raises:
        ValidationError: it is malformed or not allowed.
    """
    malformed = ValidationError(f"{where} is no valid http or https URL", param=where)
    if (
        len(url) > MAX_URL_CHARS
        or not url.isascii()
        or not url.isprintable()
        or set(url) & set('\\ "<>^`{|}')
    ):
        raise malformed
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise malformed from None
    if parts.scheme not in HTTP or not host or "@" in parts.netloc or "%" in parts.netloc:
        raise malformed
    target = FetchTarget(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme], _path(parts))
    if not {name.lower() for name in allowed} & _names(target):
        allowed_names = ", ".join(sorted(allowed)) or "none"
        raise ValidationError(
            f"{where} names the host {target.authority!r:.120}, which the operator does not allow "
            f"(--allowed-media-domains: {allowed_names}); send it as a data URL",
            param=where,
        )
    return target


def _names(target: FetchTarget) -> set[str]:
    """Return the forms in which the operator may have named the host."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    own = {target.host, host} if target.port == DEFAULT_PORTS[target.scheme] else set[str]()
    return own | {f"{host}:{target.port}"}


def _path(parts: urllib.parse.SplitResult) -> str:
    path = parts.path or "/"
    return f"{path}?{parts.query}" if parts.query else path


async def fetch(url: str, allowed: Collection[str], where: str) -> bytes:
    """Return the bytes of a URL.

    Raises:
        ValidationError: it is not allowed, its host has a private address, or the host does not deliver an answer of
            allowed size in time.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _follow(url, allowed, where)
    except TimeoutError:
        raise ValidationError(f"{where} could not be fetched within {LIMIT_S:g} s", param=where) from None
    except (OSError, h11.RemoteProtocolError) as error:
        raise ValidationError(f"{where} could not be fetched: {type(error).__name__}", param=where) from None


async def _follow(url: str, allowed: Collection[str], where: str) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        target = checked_target(url, allowed, where)
        answer = await _get(target, await checked_address(target, where), where)
        if isinstance(answer, bytes):
            return answer
        onward = urllib.parse.urljoin(url, answer)
        if target.scheme == "https" and not onward.lower().startswith("https:"):
            raise ValidationError(f"{where} redirects from https to another scheme", param=where)
        url = onward
    raise ValidationError(f"{where} redirects more than {MAX_REDIRECTS} times", param=where)


async def checked_address(target: FetchTarget, where: str) -> str:
    """Return an address of a host, all of whose addresses may be dialed.

    Raises:
        ValidationError: it has none, or one that is not public.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError:
        raise ValidationError(f"{where} names a host that does not resolve", param=where) from None
    addresses = [str(info[4][0]) for info in found]
    if not addresses or not (_is_local_name(target.host) or all(map(is_public, addresses))):
        raise ValidationError(
            f"{where} names a host with an address that is not public; the operator can allow an address itself",
            param=where,
        )
    return addresses[0]


def _is_local_name(host: str) -> bool:
    """Return whether a host, which the operator has allowed, states its address itself."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def is_public(address: str) -> bool:
    """Return whether an address is one of the public Internet, also if another one is inside it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in TRANSLATED or ip.sixtofour is not None or ip.teredo is not None:
            return False
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
    return ip.is_global and not ip.is_multicast


async def _get(target: FetchTarget, address: str, where: str) -> bytes | str:
    """Return the body of an answer, or the URL to which it redirects."""
    tls = ssl.create_default_context() if target.scheme == "https" else None
    name = target.host if tls is not None else None
    reader, writer = await asyncio.open_connection(address, target.port, ssl=tls, server_hostname=name)
    try:
        connection = h11.Connection(h11.CLIENT)
        headers = [
            ("Host", target.authority),
            ("User-Agent", "quire"),
            ("Accept", "image/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        request = h11.Request(method="GET", target=target.path, headers=headers)
        writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        return await _read(connection, reader, where)
    finally:
        writer.transport.abort()  # the answer is whole or refused; the host is not waited for


async def _read(connection: h11.Connection, reader: asyncio.StreamReader, where: str) -> bytes | str:
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(CHUNK))
        elif isinstance(event, h11.Response):
            onward = _checked_response(event, where)
            if onward is not None:
                return onward
        elif isinstance(event, h11.Data):
            body += event.data
            _check_length(len(body), where)
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif isinstance(event, h11.ConnectionClosed):
            raise ValidationError(
                f"{where} could not be fetched: the host closed the connection", param=where
            )


def _checked_response(response: h11.Response, where: str) -> str | None:
    """Return the URL of a redirect; None if a body follows."""
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in response.headers}
    if response.status_code in REDIRECTS and headers.get("location"):
        return headers["location"]
    if response.status_code != 200:
        raise ValidationError(
            f"{where} could not be fetched: the host answered with status {response.status_code}", param=where
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ValidationError(f"{where} could not be fetched: the host compressed its answer", param=where)
    length = headers.get("content-length", "0")
    _check_length(int(length) if length.isdigit() else 0, where)
    return None


def _check_length(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_ITEM_BYTES:
        raise ValidationError(
            f"{where} holds more than {MAX_ITEM_BYTES} bytes, the limit of one item", param=where
        )
