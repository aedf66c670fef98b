"""Errors and access in the document: which statuses every route may answer with, and who may use it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire.entrypoints.openai.errors import ANTHROPIC_REQUEST_ID, REQUEST_ID
from quire.entrypoints.openai.notes import ADJUSTED_HEADER, IGNORED_HEADER

Schema = dict[str, Any]


@dataclass(frozen=True)
class Status:
    """One status of errors, for all APIs: its meaning, and the headers that come with it besides `x-request-id`."""

    description: str
    headers: tuple[str, ...] = ()


STATUSES = {
    400: Status("A field has a value that cannot be honoured, or the body or its form is wrong."),
    401: Status("The key is missing or wrong.", ("www-authenticate",)),
    404: Status("The server does not know what is named."),
    408: Status("The request did not come in in time (--read-timeout)."),
    409: Status("Not while the server is in this state; nothing was done."),
    413: Status("The body is larger than --max-request-bytes."),
    415: Status("The body is not declared as JSON, or is encoded otherwise than with gzip."),
    429: Status("The key has used up what it may use for now.", ("retry-after",)),
    431: Status("The request has too many headers, or too long ones."),
    500: Status("The server met an error of its own."),
    503: Status("The model is loading, the queue is full, or the server is ending.", ("retry-after",)),
    504: Status("The request's time was over before anything was generated.", ("x-should-retry",)),
}
EVERYWHERE = (400, 408, 413, 415, 431, 500, 503)
"""What layers before the routes may answer, whatever was asked."""
HEADERS: dict[str, tuple[str, Schema]] = {
    REQUEST_ID: ("The server's name for this request.", {"type": "string"}),
    ANTHROPIC_REQUEST_ID: ("The same, as Anthropic's clients read it.", {"type": "string"}),
    "retry-after": ("Seconds after which to ask again.", {"type": "integer", "minimum": 1}),
    "www-authenticate": ("How a key is sent.", {"type": "string", "const": "Bearer"}),
    "x-should-retry": ("Whether to ask again.", {"type": "string", "const": "false"}),
    IGNORED_HEADER: ("Fields of the request that had no effect.", {"type": "string"}),
    ADJUSTED_HEADER: ("Values that were taken instead of those sent.", {"type": "string"}),
}
OPTIONAL_HEADERS = (IGNORED_HEADER, ADJUSTED_HEADER)
SCHEMES: dict[str, Schema] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "adminBearer": {"type": "http", "scheme": "bearer", "description": "The admin key."},
    "adminHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The admin key.",
    },
}
KEY, ADMIN_KEY = ("bearer", "header"), ("adminBearer", "adminHeader")
"""Either of two ways to send a key."""


@dataclass(frozen=True)
class Access:
    """Who may use what: `has_keys` is false for a server that is open to all, but for the controls."""

    has_keys: bool
    has_limits: bool
    open_paths: frozenset[str]

    def schemes(self, path: str, *, is_control: bool) -> tuple[str, ...]:
        """Names of the security schemes of a path, of which one is enough; none: it is open."""
        if is_control:
            return ADMIN_KEY
        return KEY if self.has_keys and path not in self.open_paths else ()

    def errors(self, path: str, method: str, *, is_control: bool) -> list[int]:
        """Statuses that a path may answer with because of keys."""
        needs_key = bool(self.schemes(path, is_control=is_control))
        return [401] * needs_key + [429] * (self.has_limits and method == "POST")


def header_references(names: Iterable[str]) -> Schema:
    """Headers of a response, by reference to `header_components`."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def header_components() -> Schema:
    return {
        name: {
            "description": description,
            "required": name not in (ANTHROPIC_REQUEST_ID, *OPTIONAL_HEADERS),
            "schema": schema,
        }
        for name, (description, schema) in HEADERS.items()
    }
