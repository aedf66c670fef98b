"""Who may use the routes that act on all requests.

Invariant: such a route exists only where an admin key is configured, and answers to that key alone; the key is compared
in constant time. The admin key opens every other route, too.
"""

from __future__ import annotations

import hmac
import os

from fastapi import APIRouter, Depends
from starlette.requests import Request

from quire.config import ServerConfig
from quire.entrypoints.openai.keys import given_key
from quire.entrypoints.openai.state import server_of
from quire.errors import AuthenticationError


def admin_key(config: ServerConfig) -> str | None:
    """From the configuration, else from the environment; None: there are no admin routes."""
    return config.admin_api_key or os.environ.get("QUIRE_ADMIN_API_KEY") or None


def require_admin(request: Request) -> None:
    """Raise AuthenticationError unless the request brings the admin key."""
    key = admin_key(server_of(request).config)
    given = given_key(request.headers)
    if key is None or given is None or not hmac.compare_digest(given, key.encode()):
        raise AuthenticationError("this route needs the admin key: Authorization: Bearer <key>")


def admin_router() -> APIRouter:
    """A router whose routes need the admin key."""
    return APIRouter(dependencies=[Depends(require_admin)])
