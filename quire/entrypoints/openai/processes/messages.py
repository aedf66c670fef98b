"""What the first API process and each of the others say to each other.

Invariant: msgspec structs in msgpack, never pickle; both ends are of one installation, started one by the other.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.config import EngineConfig, ServerConfig
from quire.engine.remote import CoreAddress
from quire.engine.sleep import Rest
from quire.entrypoints.openai.keys import Tenant
from quire.errors import (
    ConflictError,
    EngineDeadError,
    EngineError,
    NotFoundError,
    QuireError,
    UnavailableError,
    ValidationError,
)
from quire.lora_request import LoRARequest


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first word to a new process: who it is, and all that it is to know.

    `page` is its page of the ledger, which has `num_pages`, and `front_end` its number, which none had before. Keys and
    limits of `tenants` are those that the server started with, whatever has become of their file.
    """

    page: int
    num_pages: int
    front_end: int
    engine: EngineConfig
    server: ServerConfig
    tenants: dict[str, Tenant]


class CoreStarted(msgspec.Struct, tag="core_started", frozen=True):
    """There is a core, and this is where."""

    core: int
    address: CoreAddress


class CoreLost(msgspec.Struct, tag="core_lost", frozen=True):
    """A core is gone; there may be another."""

    core: int


class Resting(msgspec.Struct, tag="resting", frozen=True):
    """What of the engine sleeps; `dozes`: it takes no requests, because it is about to."""

    rest: Rest
    dozes: bool


class Adapters(msgspec.Struct, tag="adapters", frozen=True):
    """Serve these, by their names, and no others."""

    served: dict[str, LoRARequest]


class EngineEnded(msgspec.Struct, tag="engine_ended", frozen=True):
    """There will be no core any more: end all streams, and then yourself."""

    reason: str


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Take no more work, finish what there is, and end."""


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """End now what you still do."""


class Up(msgspec.Struct, tag="up", frozen=True):
    """Of a new process: it is ready for requests, and connections are welcome."""


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """A question; an `Answer` of this number follows."""

    number: int
    question: str
    args: list[Any]


class Refusal(msgspec.Struct, frozen=True):
    """An error for whoever asked: the name of its class, and what it is made of."""

    kind: str
    message: str
    terms: dict[str, Any]


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """What is asked, or why it is refused; `failed`: there is neither, and the log of who was asked says why."""

    number: int
    result: Any = None
    refusal: Refusal | None = None
    failed: bool = False


KINDS: dict[str, type[QuireError]] = {
    kind.__name__: kind
    for kind in (
        ValidationError,
        ConflictError,
        NotFoundError,
        UnavailableError,
        EngineError,
        EngineDeadError,
        QuireError,
    )
}
TERMS = ("param", "retry_after")


def refusal_of(error: QuireError) -> Refusal:
    """As the nearest class that can be told."""
    kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in KINDS)
    return Refusal(kind, str(error), {name: getattr(error, name) for name in TERMS if hasattr(error, name)})


def error_of(refusal: Refusal) -> QuireError:
    return KINDS[refusal.kind](refusal.message, **refusal.terms)


Message = (
    Hello | CoreStarted | CoreLost | Resting | Adapters | EngineEnded | Drain | Cancel | Up | Ask | Answer
)
