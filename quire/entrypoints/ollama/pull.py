# SPDX-License-Identifier: Apache-2.0
"""POST /api/pull and DELETE /api/delete: models of this machine's cache.

Invariant: a client makes the server fetch something only with --allow-pull, one model at a time, and a download ends
with its client. Only Hugging Face's own library changes the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.entrypoints.ollama.protocol import NamedRequest
from quire.entrypoints.openai.errors import body_of, json_response, ollama_body, request_id_of, status_of
from quire.entrypoints.openai.in_flight import ClientDisconnectedError, InFlight
from quire.entrypoints.openai.openapi.operation import Operation, describe, json_lines
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import is_admin
from quire.errors import ConfigError, ConflictError, ForbiddenError, NotFoundError, ValidationError
from quire.model_cache.cache import cached_model, is_hub_id, remove

router = APIRouter()
HOSTS = ("hf.co/", "huggingface.co/")  # Ollama's beginnings of names that belong to Hugging Face.
SUCCESS = "success"


class PullRequest(NamedRequest):
    """POST /api/pull"""

    insecure: bool = False
    stream: bool = True


class DeleteRequest(NamedRequest):
    """DELETE /api/delete"""


class PullStatus(msgspec.Struct, kw_only=True):
    """Progress of a download in bytes; the last one has the status "success"."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class Pulls:
    """Downloads that clients ask for, one at a time.

    Args:
        download_dir: cache directory; None: Hugging Face's own.
    """

    def __init__(self, download_dir: str | None) -> None:
        self._download_dir = download_dir
        self._is_busy = False

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    async def progress(self, model: str) -> AsyncGenerator[PullStatus, None]:
        """Download a model; yield the progress. Closing the generator ends the download.

        Raises:
            ConflictError: another model is being fetched.
            NotFoundError: the model cannot be fetched.
        """
        if self._is_busy:
            raise ConflictError("another model is being fetched; send the request again once that is done")
        self._is_busy = True
        try:
            yield PullStatus(status="pulling manifest")
            async with contextlib.aclosing(self._lines(model)) as lines:
                async for line in lines:
                    if "error" in line:
                        raise NotFoundError(str(line["error"]), param="model")
                    if "total" in line:
                        yield _progress(model, line)
            yield PullStatus(status=SUCCESS)
        finally:
            self._is_busy = False

    async def _lines(self, model: str) -> AsyncGenerator[dict[str, Any], None]:
        command = [sys.executable, "-m", "quire.model_cache.fetch", model]
        process = await asyncio.create_subprocess_exec(
            *command,
            *([] if self._download_dir is None else [self._download_dir]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            last: dict[str, Any] = {}
            async for text in process.stdout:
                last = json.loads(text)
                yield last
            if await process.wait() != 0 and "error" not in last:
                yield {"error": f"the download of {model} ended with exit code {process.returncode}"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _progress(model: str, line: dict[str, Any]) -> PullStatus:
    total, completed = line["total"], line["completed"]
    return PullStatus(status=f"pulling {model}", digest=model, total=total, completed=completed)


class PullStream(Response):
    """Response that sends the progress as lines of JSON while the client is connected."""

    def __init__(
        self, statuses: AsyncGenerator[PullStatus, None], first: PullStatus, in_flight: InFlight
    ) -> None:
        super().__init__(media_type="application/x-ndjson", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._statuses = statuses
        self._first = first
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._statuses):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._in_flight.run(self._send_lines(send), receive)
            except ClientDisconnectedError:
                return
            except Exception as error:  # the response has begun, so the error must be a line
                request_id = request_id_of(scope)
                body = ollama_body(body_of(error, request_id), status_of(error), request_id)
                await _send(send, body)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_lines(self, send: Send) -> None:
        await _send(send, self._first)
        async for status in self._statuses:
            await _send(send, status)


async def _send(send: Send, line: msgspec.Struct) -> None:
    body = msgspec.json.encode(line) + b"\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


@router.post("/api/pull")
@describe(
    Operation(body=(PullRequest,), reply=PullStatus, stream=json_lines(PullStatus), errors=(403, 404, 409))
)
async def pull(request: Request) -> Response:
    """Fetch a model from Hugging Face into this machine's cache; one that is served is there already."""
    body = await read_request(request, PullRequest)
    server = server_of(request)
    name = _plain(body.given_name())
    if name in server.served_names:
        return json_response(PullStatus(status=SUCCESS))
    if not is_hub_id(name):
        raise ValidationError(
            f"{name!r:.100} cannot be fetched: name a Hugging Face model, such as "
            "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
            param="model",
        )
    if not server.config.allow_pull:
        raise ForbiddenError(
            f"this server fetches no models for clients; its operator can start it with --allow-pull, or run "
            f"`quire pull {name}`"
        )
    pulls: Pulls = request.app.state.pulls
    statuses = pulls.progress(name)
    first = await anext(statuses)
    if body.stream:
        return PullStream(statuses, first, server.in_flight)
    return json_response(await server.in_flight.run(_last(statuses), request.receive))


async def _last(statuses: AsyncGenerator[PullStatus, None]) -> PullStatus:
    async with contextlib.aclosing(statuses):
        return [status async for status in statuses][-1]


@router.delete("/api/delete")
@describe(Operation(body=(DeleteRequest,), errors=(403, 404, 409)))
async def delete(request: Request) -> Response:
    """Remove a model from this machine's cache, with all its revisions; the served model is not removed."""
    body = await read_request(request, DeleteRequest)
    server = server_of(request)
    name = _plain(body.given_name())
    if not (server.config.allow_pull or is_admin(request)):
        raise ForbiddenError(
            "this server removes no models for clients; its operator can start it with --allow-pull, or run "
            "`quire rm`"
        )
    if name in (*server.served_names, _repository(server.engine.config.model.model)):
        raise ConflictError(f"{name!r:.100} is served; end the server before its model is removed")
    if request.app.state.pulls.is_busy:
        raise ConflictError("a model is being fetched; send the request again once that is done")
    await asyncio.to_thread(_removed, name, server.engine.config.load.download_dir)
    return Response()


def _removed(name: str, download_dir: str | None) -> None:
    """Remove a model.

    Raises:
        NotFoundError: it is not in the cache.
    """
    try:
        remove(cached_model(name, download_dir), download_dir)
    except ConfigError as error:
        raise NotFoundError(str(error), param="model") from None


def _plain(name: str) -> str:
    """Return a name without the host and the tag that Ollama's clients add."""
    for host in HOSTS:
        name = name.removeprefix(host)
    return name.removesuffix(":latest")


def _repository(model: str) -> str:
    return model.partition(":")[0]


def install(app: FastAPI, state: ServerState) -> None:
    """Give the app its downloads."""
    app.state.pulls = Pulls(state.engine.config.load.download_dir)
