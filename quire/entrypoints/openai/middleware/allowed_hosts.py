# SPDX-License-Identifier: Apache-2.0
"""Host header checks, which prevent DNS rebinding.

A foreign page can point its own name at 127.0.0.1, and the browser then treats this server as the page's origin.
Addresses are always allowed, since no name was resolved, and so are localhost and *.localhost.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from starlette.types import Scope

from quire.config import ServerConfig
from quire.entrypoints.openai.greeting import reaches_others

ANY = "*"

LOCALHOST = "localhost"

_HOST = re.compile(r"(\[[^\[\]\s]+\]|[^\[\]:@/\\\s]+)(?::[0-9]*)?")


class AllowedHosts:
    """Set of host names that the server accepts.

    Args:
        has_keys: whether requests need a key, which protects against foreign pages.
    """

    def __init__(self, config: ServerConfig, *, has_keys: bool) -> None:
        self._always = bool(config.allowed_hosts)
        self._never = ANY in config.allowed_hosts or (
            not self._always and (has_keys or reaches_others(config.host))
        )
        names = (LOCALHOST, f"*.{LOCALHOST}", config.host, *config.allowed_hosts)
        self._names = frozenset(_normalized(name) for name in names if name)

    def refused(self, scope: Scope) -> str | None:
        """Return the disallowed host name of a request, or None."""
        if self._never or not (self._always or _is_loopback((scope.get("server") or ("", 0))[0])):
            return None
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        target = scope["raw_path"].decode("latin-1")
        if not target.startswith("/") and "//" in target:  # a proxy's form, whose target includes the name
            given.append(urlsplit(target).netloc)
        return next((host for host in given if not self._allows(host)), None)

    def _allows(self, host: str) -> bool:
        name = _normalized(_without_port(host))
        if _address(name) is not None or name in self._names:
            return True
        labels = name.split(".")
        return any(".".join(["*", *labels[start:]]) in self._names for start in range(1, len(labels)))


def _without_port(host: str) -> str:
    """Return the name or address of a Host header; malformed values are returned as they are and match no name."""
    parts = _HOST.fullmatch(host)
    return parts[1].strip("[]") if parts else host


def _normalized(name: str) -> str:
    return name.lower().removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and address.is_loopback
