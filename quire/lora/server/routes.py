# SPDX-License-Identifier: Apache-2.0
"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for the admin key."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.entrypoints.openai.families import ServerFeature
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.protocol.requests import RequestModel
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import admin_router
from quire.errors import ValidationError
from quire.lora.server.changes import NAME, AdapterChanges

controls = admin_router()
TEXT = {"text/plain": {"type": "string"}}
MAX_PATH_CHARS = 4096


class LoadLoRAAdapter(RequestModel):
    """`lora_path` is a directory on the server's machine; `load_inplace` replaces an adapter of the same name."""

    lora_name: Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^{NAME}$"})]
    lora_path: str = Field(min_length=1, max_length=MAX_PATH_CHARS)
    load_inplace: bool = False


class UnloadLoRAAdapter(RequestModel):
    lora_name: str


@controls.post("/v1/load_lora_adapter")
@describe(Operation(body=(LoadLoRAAdapter,), other=TEXT, errors=(409,)))
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter and serve it; the answer comes once it has been loaded and checked."""
    body = await read_request(request, LoadLoRAAdapter)
    server = _serving_adapters(request)
    await server.run_command("load_adapter", body.lora_name, body.lora_path, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@controls.post("/v1/unload_lora_adapter")
@describe(Operation(body=(UnloadLoRAAdapter,), other=TEXT, errors=(404, 409)))
async def unload_lora_adapter(request: Request) -> Response:
    """Unload an adapter; the answer comes when the last request that uses it has finished."""
    body = await read_request(request, UnloadLoRAAdapter)
    await _serving_adapters(request).run_command("unload_adapter", body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def load(server: ServerState, name: str, path: str, inplace: bool) -> None:
    """Load an adapter for all processes; runs in the supervisor process."""
    await _changes_of(server).load(name, path, inplace=inplace)


async def unload(server: ServerState, name: str) -> None:
    """Unload an adapter for all processes; runs in the supervisor process."""
    await _changes_of(server).unload(name)


async def resolve(server: ServerState, name: str) -> None:
    """Resolve an adapter for all processes; runs in the supervisor process."""
    await _changes_of(server).resolve(name)


def _changes_of(server: ServerState) -> AdapterChanges:
    changes = server.adapter_changes
    assert isinstance(changes, AdapterChanges), "the routes are installed together with the changes"
    return changes


def _serving_adapters(request: Request) -> ServerState:
    server = server_of(request)
    if not server.engine.config.lora.enable_lora:
        raise ValidationError("this server serves no adapters (--enable-lora)")
    return server


FEATURE = ServerFeature(
    controls=(controls,),
    commands={"load_adapter": load, "unload_adapter": unload, "resolve_adapter": resolve},
)
