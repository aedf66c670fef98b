# SPDX-License-Identifier: Apache-2.0
"""Keys of the router: the server's, those of single models, and the admin key.

Invariant: a model with keys of its own takes these only, any other one the server's. The admin key opens all. A model's
server checks its keys again, and by them knows the tenant.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers

from quire.config import ServerConfig
from quire.config.fields import digest_of
from quire.entrypoints.openai.keys import Keyring, admin_key, api_keys, given_key, make_keyring
from quire.errors import AuthenticationError
from quire.model_router.models_file import ModelEntry, Models

NEEDS_KEY = "this server needs an API key: Authorization: Bearer <key>"
NEEDS_ADMIN = "the models are reloaded for the admin key only: Authorization: Bearer <admin key>"
FOREIGN_KEY = "this key is not for the model {!r}"


class Access:
    """Decides which keys may do what.

    Raises:
        ConfigError: the API key file is invalid.
    """

    def __init__(self, config: ServerConfig, models: Models) -> None:
        self._server = make_keyring(api_keys(config), config.api_key_file)
        self._own = _own_keys(models)
        hashed = admin_key(config)
        self._admin = None if hashed is None else digest_of(hashed)

    def __bool__(self) -> bool:
        """True if every request needs a key, which protects against foreign pages."""
        return bool(self._server)

    @property
    def has_admin(self) -> bool:
        return self._admin is not None

    def is_admin(self, headers: Headers) -> bool:
        """Return whether the request has the admin key."""
        key = given_key(headers)
        return (
            key is not None
            and self._admin is not None
            and hmac.compare_digest(hashlib.sha256(key).digest(), self._admin)
        )

    def reload(self, models: Models) -> None:
        """Use the keys of these models from now on."""
        self._own = _own_keys(models)

    def check_operator(self, headers: Headers) -> None:
        """Check a request that changes what is served.

        Raises:
            AuthenticationError: the server has an admin key, and this is not it.
        """
        if self.has_admin and not self.is_admin(headers):
            raise AuthenticationError(NEEDS_ADMIN)

    def check_any(self, headers: Headers) -> None:
        """Check a request that is for no one model.

        Raises:
            AuthenticationError: the server has keys, and this is none of them nor one of a model's.
        """
        if self._server and not self.is_admin(headers):
            rings = (self._server, *self._own.values())
            if not any([_has(ring, headers) for ring in rings]):  # noqa: C419 - all, for the same time
                raise AuthenticationError(NEEDS_KEY)

    def check_model(self, headers: Headers, entry: ModelEntry) -> None:
        """Check a request for a model.

        Raises:
            AuthenticationError: the model needs another key.
        """
        ring = self._own.get(entry.name, self._server)
        if ring and not self.is_admin(headers) and not _has(ring, headers):
            is_known = any(_has(one, headers) for one in (self._server, *self._own.values()))
            raise AuthenticationError(FOREIGN_KEY.format(entry.name) if is_known else NEEDS_KEY)

    def may_see(self, headers: Headers, entry: ModelEntry) -> bool:
        """Return whether a model is listed for this request: it is unless its own keys are others."""
        return entry.name not in self._own or self.is_admin(headers) or _has(self._own[entry.name], headers)


def _own_keys(models: Models) -> dict[str, Keyring]:
    """Return the keys of the models that have keys of their own."""
    entries = models.entries.items()
    return {name: make_keyring(entry.api_keys, None) for name, entry in entries if entry.api_keys}


def _has(ring: Keyring, headers: Headers) -> bool:
    key = given_key(headers)
    return key is not None and ring.tenant_of(key) is not None
