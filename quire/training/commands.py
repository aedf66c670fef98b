# SPDX-License-Identifier: Apache-2.0
"""Commands that the training routes share, and how these read bodies and options.

Invariant: commands run in the process that owns the cores, one at a time, and end even if their client is gone.
"""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request

from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.requests import RequestModel
from quire.entrypoints.openai.state import ServerState, server_of
from quire.errors import UnavailableError, ValidationError

Body = TypeVar("Body", bound=RequestModel)

FLAGS = {"true": True, "1": True, "false": False, "0": False}
VERBS = frozenset(
    {
        "connect",
        "disconnect",
        "begin",
        "update",
        "finish",
        "abort",
        "load",
        "rename",
        "checksums",
        "add_named",
        "sync",
    }
)
"""Methods of `AsyncWeightUpdates` that routes call."""


async def read_optional(request: Request, model: type[Body]) -> Body:
    """Read a body that may be missing."""
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    return await read_request(request, model) if has_body else model()


async def run(request: Request, verb: str, *args: Any) -> Any:
    """Run a method of the engine's weight updates where the cores are owned; returns its result."""
    return await server_of(request).run_command("train", verb, list(args))


def option(request: Request, name: str, default: str) -> str:
    """Return the last value of a query parameter."""
    return request.query_params.getlist(name)[-1] if name in request.query_params else default


def flag(request: Request, name: str) -> bool:
    """Return a query parameter that is true by default.

    Raises:
        ValidationError: it is neither true nor false.
    """
    text = option(request, name, "true").lower()
    if text not in FLAGS:
        raise ValidationError(f"{name} must be true or false, got {text!r:.40}", param=name)
    return FLAGS[text]


def check_options(request: Request, *names: str) -> None:
    """Raise ValidationError for a query parameter of another name."""
    for name in request.query_params:
        if name not in names:
            known = f"; it has {', '.join(names)}" if names else ""
            raise ValidationError(f"this route has no option {name!r:.64}{known}", param=name[:64])


async def train(server: ServerState, verb: str, args: list[Any]) -> Any:
    """Run a command for all processes; runs in the process that owns the cores."""
    if server.draining:
        raise UnavailableError("the server is shutting down")
    if not server.engine.is_ready and not server.engine.is_sleeping:
        raise UnavailableError("the model is loading", retry_after=2)
    if verb == "pause":
        mode, clear_cache = args
        return await server.engine.pause_generation(mode, clear_cache=clear_cache)
    if verb == "resume":
        return await server.engine.resume_generation()
    assert verb in VERBS, verb
    return await getattr(server.engine.weights, verb)(*args)
