"""On whose terms a request runs: whose share it takes, how urgent it is, whose prefix cache it sees, for how long, in
which replica, and of whose trace it is a part.

Invariant: where keys are in use the key decides, and nothing that a client writes can change it.
"""

from __future__ import annotations

import hashlib
import math

from starlette.requests import Request

from quire.entrypoints.openai.protocol.requests import EngineRequest
from quire.entrypoints.openai.state import server_of
from quire.errors import ValidationError

TIMEOUT_HEADER = "x-request-timeout"
TRACE_HEADERS = ("traceparent", "tracestate")
MAX_TRACE_CHARS = 512
"""A longer one is passed over; so much of a `tracestate` all must take."""
REPLICA_HEADER = "x-data-parallel-rank"
_MOST_DIGITS = 9
"""Of a number of a replica."""
READ_HEADERS = {TIMEOUT_HEADER: {"type": "number", "exclusiveMinimum": 0}}
"""Request headers that any client may send, with their schemas; which replicas there are only a load balancer knows."""


def tenant_of(request: Request, body: EngineRequest) -> str:
    """The name of the key's tenant if the server has keys, else the field `user`."""
    return str(request.scope["state"].get("tenant") or body.user or "")


def apply_terms(request: Request, body: EngineRequest) -> None:
    """Write into a request what the server and the key say of it.

    Raises:
        ValidationError: its deadline is no number of seconds, or its replica none of these.
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
    """Of the client's trace, as W3C's Trace Context has them."""
    given = {name: request.headers.get(name, "") for name in TRACE_HEADERS}
    return {name: value for name, value in given.items() if 0 < len(value) <= MAX_TRACE_CHARS}


def _timeout(request: Request, body: EngineRequest) -> float | None:
    """The body's field, else the header."""
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
    """The one that the header names, if there is one."""
    text = request.headers.get(REPLICA_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ValidationError(
            f"the header {REPLICA_HEADER} must be the number of a replica", param="data_parallel_rank"
        )
    return int(text)


def _salt(tenant: str, own: str | None) -> str:
    """Equal for equal pairs only; of fixed length, since salts are short."""
    parts = [tenant, *([] if own is None else [own])]
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).hexdigest()
