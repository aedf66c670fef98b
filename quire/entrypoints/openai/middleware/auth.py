"""Authentication by a key, as a bearer token or in `x-api-key`.

Invariant: every path needs a key except those that it was given as open. The decision looks at the path that the router
will use and at nothing else of the request; keys are compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.entrypoints.openai.errors import request_id_of, response_of
from quire.entrypoints.openai.tenant import tenant_of_key
from quire.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping"})


class Auth:
    """Lets everything pass if there are no keys; leaves the name of the one that was used in the request's state.

    Args:
        open_paths: paths that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        root_path: str = "",
        open_paths: frozenset[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._keys = {tenant_of_key(key.encode()): key.encode() for key in api_keys}
        self._open_paths = open_paths | {root_path + path for path in open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = self._tenant(scope) if self._keys else None
        if self._keys and scope["path"] not in self._open_paths and tenant is None:
            error = AuthenticationError("this server needs an API key: Authorization: Bearer <key>")
            await response_of(error, request_id_of(scope))(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        """Name of the key that the request brings; None if it brings none of ours."""
        key = _given_key(Headers(scope=scope))
        if key is None:
            return None
        given = key.strip().encode("latin-1")
        # All keys are compared, so that the time does not tell which one came near.
        found = [name for name, key in self._keys.items() if hmac.compare_digest(given, key)]
        return found[0] if found else None


def _given_key(headers: Headers) -> str | None:
    """The key of a request; None if it brings none, or two of one kind."""
    values = headers.getlist("authorization")
    if not values:
        keys = headers.getlist("x-api-key")
        return keys[0] if len(keys) == 1 else None
    scheme, _, token = (values[0] if len(values) == 1 else "").partition(" ")
    return token if scheme.lower() == "bearer" else None
