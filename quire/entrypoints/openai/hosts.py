"""Names under which a server may be asked: a defence against DNS rebinding.

A page of a stranger can give its own name the address 127.0.0.1; a browser then takes a server on this machine for the
page's own. Its requests have that name in their Host header. Invariant: an address is always allowed, because no name
was resolved, and so are localhost and *.localhost, which stand for loopback alone.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from starlette.types import Scope

from quire.config import ServerConfig
from quire.entrypoints.openai.welcome import reaches_others

ANY = "*"
LOCALHOST = "localhost"
_HOST = re.compile(r"(\[[^\[\]\s]+\]|[^\[\]:@/\\\s]+)(?::[0-9]*)?")


class AllowedHosts:
    """Names of one server.

    Args:
        has_keys: whether requests need a key, which no stranger's page has.
    """

    def __init__(self, config: ServerConfig, *, has_keys: bool) -> None:
        self._always = bool(config.allowed_hosts)
        self._never = ANY in config.allowed_hosts or (
            not self._always and (has_keys or reaches_others(config.host))
        )
        names = (LOCALHOST, f"*.{LOCALHOST}", config.host, *config.allowed_hosts)
        self._names = frozenset(_settled(name) for name in names if name)

    def refused(self, scope: Scope) -> str | None:
        """Return the name by which a request came, if it is not allowed."""
        if self._never or not (self._always or _is_loopback((scope.get("server") or ("", 0))[0])):
            return None
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        target = scope["raw_path"].decode("latin-1")
        if (
            not target.startswith("/") and "//" in target
        ):  # a proxy's form, in which the name is in the target
            given.append(urlsplit(target).netloc)
        return next((host for host in given if not self._allows(host)), None)

    def _allows(self, host: str) -> bool:
        name = _settled(_without_port(host))
        if _address(name) is not None or name in self._names:
            return True
        labels = name.split(".")
        return any(".".join(["*", *labels[start:]]) in self._names for start in range(1, len(labels)))


def _without_port(host: str) -> str:
    """Return the name or the address; what has another form stays as it is, and is no name then."""
    parts = _HOST.fullmatch(host)
    return parts[1].strip("[]") if parts else host


def _settled(name: str) -> str:
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
