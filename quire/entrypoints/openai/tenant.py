# SPDX-License-Identifier: Apache-2.0
"""Per-request settings from API key and headers (tenant, priority, cache salt, timeout, replica, trace), and the admin
key.

Invariant: where keys are in use the key decides, and nothing that a client writes can change it. Admin routes exist
only where an admin key is configured and accept that key alone, compared in constant time; the admin key also opens
every other route.
"""

from __future__ import annotations

import hashlib
import hmac
import math

from fastapi import APIRouter, Depends
from starlette.requests import Request

from quire.config.fields import digest_of
from quire.entrypoints.openai.keys import admin_key, given_key
from quire.entrypoints.openai.protocol.requests import EngineRequest
from quire.entrypoints.openai.state import server_of
from quire.errors import AuthenticationError, ValidationError

TIMEOUT_HEADER = "x-request-timeout"
TRACE_HEADERS = ("traceparent", "tracestate")
MAX_TRACE_CHARS = 512  # Longer headers are ignored; W3C requires support of a `tracestate` up to this length.
REPLICA_HEADER = "x-data-parallel-rank"
_MOST_DIGITS = 9  # Digits of a replica's number.
# Documented request headers with their schemas; the replica header is for load balancers.
READ_HEADERS = {TIMEOUT_HEADER: {"type": "number", "exclusiveMinimum": 0}}


def require_admin(request: Request) -> None:
    """Raise AuthenticationError unless the request has the admin key."""
    if not is_admin(request):
        raise AuthenticationError("this route needs the admin key: Authorization: Bearer <key>")


def is_admin(request: Request) -> bool:
    """Return whether the request has the admin key."""
    key, given = admin_key(server_of(request).config), given_key(request.headers)
    return key is not None and given is not None and _is_key(given, key)


def _is_key(given: bytes, hashed: str) -> bool:
    return hmac.compare_digest(hashlib.sha256(given).digest(), digest_of(hashed))


def admin_router() -> APIRouter:
    """Return a router whose routes need the admin key."""
    return APIRouter(dependencies=[Depends(require_admin)])


def tenant_of(request: Request, body: EngineRequest) -> str:
    """Return the tenant of the key if the server has keys, else the field `user`."""
    return str(request.scope["state"].get("tenant") or body.user or "")


def apply_request_settings(request: Request, body: EngineRequest) -> None:
    """Set the fields of a request that headers, the server and the key determine.

    Raises:
        ValidationError: the timeout or replica header is malformed.
    """
    server, name = server_of(request), request.scope["state"].get("tenant")
    body.join_trace(_trace_headers(request))
    body.choose_replica(_replica(request))
    body.timeout = _timeout(request, body) or server.config.request_timeout or None
    tenant = server.keys.tenants.get(name)
    if tenant is None:
        return
    if not tenant.own_priority:
        if "priority" in body.model_fields_set and body.priority != tenant.priority:
            body.notes.ignore("priority")
        body.priority = tenant.priority
    if not tenant.shared_cache:
        body.cache_salt = _salt(name, body.cache_salt)


def _trace_headers(request: Request) -> dict[str, str]:
    """Return the client's W3C Trace Context headers."""
    given = {name: request.headers.get(name, "") for name in TRACE_HEADERS}
    return {name: value for name, value in given.items() if 0 < len(value) <= MAX_TRACE_CHARS}


def _timeout(request: Request, body: EngineRequest) -> float | None:
    """Return the timeout of the body's field, else of the header."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return body.timeout
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValidationError(
            f"the header {TIMEOUT_HEADER} must be a positive number of seconds", param="timeout"
        )
    return seconds if body.timeout is None else body.timeout


def _replica(request: Request) -> int | None:
    """Return the replica that the header names, if any."""
    text = request.headers.get(REPLICA_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ValidationError(
            f"the header {REPLICA_HEADER} must be the number of a replica", param="data_parallel_rank"
        )
    return int(text)


def _salt(tenant: str, own: str | None) -> str:
    """Return a salt of fixed length that is equal for equal pairs only."""
    parts = [tenant, *([] if own is None else [own])]
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).hexdigest()
