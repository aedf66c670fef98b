# SPDX-License-Identifier: Apache-2.0
"""API keys, their tenants, and request ids given by clients.

Invariant: no key is kept, only its SHA-256. A given key is compared with all keys in constant time. A client's
`x-request-id` names a request in responses, logs and queries, and grants nothing: the server has its own unique ids,
and two requests may carry the same client id.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.datastructures import Headers

from quire.config import EngineConfig, ServerConfig
from quire.config.fields import HASHED, digest_of, hashed_key
from quire.errors import ConfigError

HEADER = "x-request-id"
MAX_CHARS = 128
MAX_ENDED = 1024  # requests that are found by their client's id after they ended
_SANE = re.compile(rf"[A-Za-z0-9._:=@+~-]{{1,{MAX_CHARS}}}")


def given_id(headers: Headers) -> str | None:
    """Return the client's request id; None if there is none, several, or one that is unsafe in logs."""
    values = headers.getlist(HEADER)
    return values[0] if len(values) == 1 and _SANE.fullmatch(values[0]) else None


class ClientIds:
    """Map from client request ids to own ids, for all requests in flight and the last ones that ended."""

    def __init__(self) -> None:
        self._own: defaultdict[str, list[str]] = defaultdict(list)
        self._ended: deque[tuple[str, str]] = deque()

    @contextmanager
    def used(self, client_id: str, own_id: str) -> Iterator[None]:
        """Register a request while it is in flight, and for a while after."""
        self._own[client_id].append(own_id)
        try:
            yield
        finally:
            self._ended.append((client_id, own_id))
            if len(self._ended) > MAX_ENDED:
                self._forget(*self._ended.popleft())

    def names_of(self, request_id: str) -> list[str]:
        """Return the id itself, and the own ids of the requests that carried it."""
        return [request_id, *self._own.get(request_id, ())]

    def _forget(self, client_id: str, own_id: str) -> None:
        self._own[client_id].remove(own_id)
        if not self._own[client_id]:
            del self._own[client_id]


INT64 = msgspec.Meta(ge=-(2**63), le=2**63 - 1)
Limit = Annotated[int, msgspec.Meta(ge=1)] | None  # None: no limit.


class Tenant(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Tenant: settings shared by the holders of its keys; documented in docs/security.md."""

    keys: list[str] = []
    priority: Annotated[int, INT64] = 0
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    max_concurrent: Limit = None
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    shared_cache: bool = False
    own_priority: bool = False

    @property
    def has_limits(self) -> bool:
        """True if a request may ever be rejected because of earlier ones."""
        limits = self.max_concurrent, self.requests_per_minute, self.tokens_per_minute
        return any(limit is not None for limit in limits)


class Keyring:
    """Tenants by name, and the tenant of each key; a server without keys is open to all.

    Raises:
        ConfigError: a key is malformed, or belongs to two tenants.
    """

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self.tenants = {name: _hashed(name, tenant) for name, tenant in tenants.items()}
        self._names: dict[bytes, str] = {}
        for name, tenant in self.tenants.items():
            for digest in map(digest_of, tenant.keys):
                if self._names.setdefault(digest, name) != name:
                    raise ConfigError(
                        f"--api-key-file: the tenants {self._names[digest]!r} and {name!r} have the same key"
                    )

    def __bool__(self) -> bool:
        return bool(self._names)

    def tenant_of(self, key: bytes) -> str | None:
        """Return the name of the tenant that owns a key."""
        given = hashlib.sha256(key).digest()
        # All are compared, so that timing does not reveal a near match.
        found = [name for digest, name in self._names.items() if hmac.compare_digest(given, digest)]
        return found[0] if found else None

    def weighted(self, config: EngineConfig) -> EngineConfig:
        """Return the engine configuration with the tenants' weights.

        Raises:
            ConfigError: a weight or priority has no effect under the scheduling policy.
        """
        weights = {name: tenant.weight for name, tenant in self.tenants.items() if tenant.weight != 1.0}
        policy = config.scheduler.scheduling_policy
        if weights and policy != "fair":
            raise ConfigError("--api-key-file: a weight needs --scheduling-policy fair")
        if policy != "priority" and any(tenant.priority for tenant in self.tenants.values()):
            raise ConfigError("--api-key-file: a priority needs --scheduling-policy priority")
        if not weights:
            return config
        return config.evolve(fair_weights={**config.scheduler.fair_weights, **weights})


def make_keyring(keys: Sequence[str], path: str | None) -> Keyring:
    """Return the keyring of single hashed keys, each its own tenant, and of a key file.

    Raises:
        ConfigError: the file cannot be read or is invalid.
    """
    alone = {_name_of(key): Tenant(keys=[key], own_priority=True) for key in map(hashed_key, keys)}
    return Keyring({**alone, **(_read(path) if path is not None else {})})


def given_key(headers: Headers) -> bytes | None:
    """Return a request's key, from a bearer token or `x-api-key`; None if there is none or there are several."""
    values = headers.getlist("authorization")
    if not values:
        keys = headers.getlist("x-api-key")
        return keys[0].strip().encode("latin-1") if len(keys) == 1 else None
    scheme, _, token = (values[0] if len(values) == 1 else "").partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def tenant_of_key(key: bytes) -> str:
    """Return a tenant name for an API key that may be shown, unlike the key."""
    return _name_of(HASHED + hashlib.sha256(key).hexdigest())


def api_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the hashed API keys from the configuration, else from the environment."""
    from_environment = os.environ.get("QUIRE_API_KEY")
    return config.api_key or ((hashed_key(from_environment, "QUIRE_API_KEY"),) if from_environment else ())


def admin_key(config: ServerConfig) -> str | None:
    """Return the hashed admin key from the configuration, else from the environment; None: no admin routes."""
    from_environment = os.environ.get("QUIRE_ADMIN_API_KEY")
    return config.admin_api_key or (
        hashed_key(from_environment, "QUIRE_ADMIN_API_KEY") if from_environment else None
    )


def with_keys_of_environment(config: ServerConfig) -> ServerConfig:
    """Move the environment's keys into the configuration, so that no child process inherits them."""
    resolved = dataclasses.replace(config, api_key=api_keys(config), admin_api_key=admin_key(config))
    for name in ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY"):
        os.environ.pop(name, None)
    return resolved


def _name_of(hashed: str) -> str:
    return f"key-{hashed.removeprefix(HASHED)[:12]}"


def _hashed(name: str, tenant: Tenant) -> Tenant:
    where = f"--api-key-file, the tenant {name!r:.80}"
    return msgspec.structs.replace(tenant, keys=[hashed_key(key, where) for key in tenant.keys])


def _read(path: str) -> dict[str, Tenant]:
    import yaml  # imported only if there is a key file

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        tenants = msgspec.convert(content, dict[str, Tenant])
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # The reason itself is omitted, because it may quote a key.
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f": line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"--api-key-file {path} is not YAML{place}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from None
    for name, tenant in tenants.items():
        if not 0 < len(name) <= 256 or not tenant.keys or not math.isfinite(tenant.weight):
            raise ConfigError(
                f"--api-key-file {path}: the tenant {name!r:.80} needs a name of 1 to 256 characters, a key and a "
                "finite weight"
            )
    return tenants
