"""What a route says about itself, beside its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.entrypoints.openai.openapi.streams import Stream
from quire.entrypoints.openai.protocol.requests import RequestModel

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Schema = dict[str, Any]
ATTRIBUTE = "__quire_operation__"


@dataclass(frozen=True)
class Operation:
    """What a route takes and gives, besides what all routes of the server have in common.

    Args:
        body: models of the JSON body; of several, the request is one.
        reply: type of the JSON reply; None: there is none.
        anthropic: type of the JSON reply to Anthropic's clients, whose errors have their form, too; None: as others.
        stream: what is sent instead if the client asks for a stream.
        other: schemas of replies in further media types.
        errors: statuses of errors that other routes do not have.
        headers: request headers that it reads, with their schemas.
        query: parameters of the query that it reads, with their schemas.
    """

    body: tuple[type[RequestModel], ...] = ()
    reply: Any = None
    anthropic: Any = None
    stream: Stream | None = None
    other: Mapping[str, Schema] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    headers: Mapping[str, Schema] = field(default_factory=dict)
    query: Mapping[str, Schema] = field(default_factory=dict)


def describe(operation: Operation) -> Callable[[Endpoint], Endpoint]:
    """Describe the route of a function; stands below the router's decorator."""

    def described(endpoint: Endpoint) -> Endpoint:
        vars(endpoint)[ATTRIBUTE] = operation
        return endpoint

    return described


def operation_of(endpoint: Callable[..., Any]) -> Operation | None:
    """What a route said about itself."""
    found = vars(endpoint).get(ATTRIBUTE)
    return found if isinstance(found, Operation) else None
