"""Who may use the server: its keys, and what each tenant that they name is given.

Invariant: no key is kept, only its SHA-256, from when it is read; a given key is compared with all in constant time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.datastructures import Headers

from quire.config import EngineConfig, ServerConfig
from quire.config.keys import HASHED, digest_of, hashed_key
from quire.errors import ConfigError

INT64 = msgspec.Meta(ge=-(2**63), le=2**63 - 1)
Limit = Annotated[int, msgspec.Meta(ge=1)] | None
"""None: there is none."""


class Tenant(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What the holders of some keys share; documented in docs/security.md."""

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
        """Whether a request may ever be refused because of earlier ones."""
        limits = self.max_concurrent, self.requests_per_minute, self.tokens_per_minute
        return any(limit is not None for limit in limits)


class Keyring:
    """The tenants by name, and which of them a key belongs to; without any key the server is open to all.

    Raises:
        ConfigError: a key is no key, or belongs to two tenants.
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
        """The name of the tenant who has this key."""
        given = hashlib.sha256(key).digest()
        # All are compared, so that the time does not tell which one came near.
        found = [name for digest, name in self._names.items() if hmac.compare_digest(given, digest)]
        return found[0] if found else None

    def weighted(self, config: EngineConfig) -> EngineConfig:
        """The engine's configuration with the tenants' weights.

        Raises:
            ConfigError: a weight or a priority would have no effect under the scheduling policy.
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
    """Of hashed keys given one by one, each of which is a tenant of its own, and those of a file.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong.
    """
    alone = {_name_of(key): Tenant(keys=[key], own_priority=True) for key in map(hashed_key, keys)}
    return Keyring({**alone, **(_read(path) if path is not None else {})})


def given_key(headers: Headers) -> bytes | None:
    """The key that a request brings, as a bearer token or in `x-api-key`; None: it brings none, or two of a kind."""
    values = headers.getlist("authorization")
    if not values:
        keys = headers.getlist("x-api-key")
        return keys[0].strip().encode("latin-1") if len(keys) == 1 else None
    scheme, _, token = (values[0] if len(values) == 1 else "").partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def tenant_of_key(key: bytes) -> str:
    """A name for an API key, which can be shown and written to a command line, as the key cannot."""
    return _name_of(HASHED + hashlib.sha256(key).hexdigest())


def api_keys(config: ServerConfig) -> tuple[str, ...]:
    """Hashed keys from the configuration, else from the environment."""
    from_environment = os.environ.get("QUIRE_API_KEY")
    return config.api_key or ((hashed_key(from_environment, "QUIRE_API_KEY"),) if from_environment else ())


def admin_key(config: ServerConfig) -> str | None:
    """The hashed key from the configuration, else from the environment; None: there are no admin routes."""
    from_environment = os.environ.get("QUIRE_ADMIN_API_KEY")
    return config.admin_api_key or (
        hashed_key(from_environment, "QUIRE_ADMIN_API_KEY") if from_environment else None
    )


def with_keys_of_environment(config: ServerConfig) -> ServerConfig:
    """The configuration with the keys of the environment, which has them no longer: no process inherits them."""
    settled = dataclasses.replace(config, api_key=api_keys(config), admin_api_key=admin_key(config))
    for name in ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY"):
        os.environ.pop(name, None)
    return settled


def _name_of(hashed: str) -> str:
    return f"key-{hashed.removeprefix(HASHED)[:12]}"


def _hashed(name: str, tenant: Tenant) -> Tenant:
    where = f"--api-key-file, the tenant {name!r:.80}"
    return msgspec.structs.replace(tenant, keys=[hashed_key(key, where) for key in tenant.keys])


def _read(path: str) -> dict[str, Tenant]:
    import yaml  # only a server with such a file pays for it

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        tenants = msgspec.convert(content, dict[str, Tenant])
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError):
        # Without the reason, which may quote a key.
        raise ConfigError(f"--api-key-file {path} is not YAML") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from None
    for name, tenant in tenants.items():
        if not 0 < len(name) <= 256 or not tenant.keys or not math.isfinite(tenant.weight):
            raise ConfigError(
                f"--api-key-file {path}: the tenant {name!r:.80} needs a name of 1 to 256 characters, a key and a "
                "finite weight"
            )
    return tenants
