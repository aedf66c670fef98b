"""Authentication by a key, as a bearer token or in `x-api-key`.

Invariant: every path needs a key except those that it was given as open. The decision looks at the path that the router
will use and at nothing else of the request; keys are compared in constant time.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.entrypoints.openai.errors import request_id_of, response_of
from quire.entrypoints.openai.keys import Keyring, given_key
from quire.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping"})


class Auth:
    """Lets everything pass if there are no keys; leaves the name of the key's tenant in the request's state.

    Args:
        open_paths: paths that need no key.
    """

    def __init__(
        self, app: ASGIApp, keys: Keyring, root_path: str = "", open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._keys = keys
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
        """Whose key the request brings; None if it brings none of ours."""
        key = given_key(Headers(scope=scope))
        return None if key is None else self._keys.tenant_of(key)
