"""Who may use the routes that act on all requests.

Invariant: such a route exists only where an admin key is configured, and answers to that key alone; the key is compared
in constant time. The admin key opens every other route, too.
"""

from __future__ import annotations

import hashlib
import hmac

from fastapi import APIRouter, Depends
from starlette.requests import Request

from quire.config.keys import digest_of
from quire.entrypoints.openai.keys import admin_key, given_key
from quire.entrypoints.openai.state import server_of
from quire.errors import AuthenticationError


def require_admin(request: Request) -> None:
    """Raise AuthenticationError unless the request brings the admin key."""
    if not is_admin(request):
        raise AuthenticationError("this route needs the admin key: Authorization: Bearer <key>")


def is_admin(request: Request) -> bool:
    """Return whether the request brings the admin key."""
    key, given = admin_key(server_of(request).config), given_key(request.headers)
    return key is not None and given is not None and _is_key(given, key)


def _is_key(given: bytes, hashed: str) -> bool:
    return hmac.compare_digest(hashlib.sha256(given).digest(), digest_of(hashed))


def admin_router() -> APIRouter:
    """A router whose routes need the admin key."""
    return APIRouter(dependencies=[Depends(require_admin)])
