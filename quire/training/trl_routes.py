# SPDX-License-Identifier: Apache-2.0
"""Routes of TRL's generation server, for the admin key, as far as they go without NCCL.

TRL sends each parameter by itself and then resets the prefix cache. The first opens an update, and the reset finishes
it, so that no request is computed with some of them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.tenant import admin_router
from quire.errors import ValidationError
from quire.training.commands import read_optional, run
from quire.training.protocol import InitCommunicator, NamedParam, NamedParams, Nothing, UpdateMessage

controls = admin_router()


@controls.post("/init_communicator/")
@describe(Operation(body=(InitCommunicator,), reply=UpdateMessage))
async def init_communicator(request: Request) -> Response:
    """Connect to a trainer by TCP (`"backend": "tcp"`)."""
    body = await read_request(request, InitCommunicator)
    if body.backend != "tcp":
        raise ValidationError(
            'NCCL groups are not supported: send "backend": "tcp" and serve the weights as in docs/training.md',
            param="backend",
        )
    await run(request, "connect", {"backend": "tcp", "address": f"{body.host}:{body.port}"})
    return json_response(UpdateMessage("connected"))


@controls.post("/update_named_param/")
@describe(Operation(body=(NamedParam,), reply=UpdateMessage, errors=(409,)))
async def update_named_param(request: Request) -> Response:
    """Read one parameter from the trainer; it is used after /reset_prefix_cache/."""
    return await _add(request, [await read_request(request, NamedParam)])


@controls.post("/batch_update_named_params/")
@describe(Operation(body=(NamedParams,), reply=UpdateMessage, errors=(409,)))
async def batch_update_named_params(request: Request) -> Response:
    """Read several parameters from the trainer; they are used after /reset_prefix_cache/."""
    return await _add(request, (await read_request(request, NamedParams)).params)


@controls.post("/reset_prefix_cache/")
@describe(Operation(body=(Nothing,), reply=UpdateMessage, errors=(409,)))
async def reset_prefix_cache(request: Request) -> Response:
    """Use the parameters that were sent, and drop all cached prefixes."""
    await read_optional(request, Nothing)
    await run(request, "sync")
    return json_response(UpdateMessage("the prefix cache is reset"))


@controls.post("/close_communicator/")
@describe(Operation(body=(Nothing,), reply=UpdateMessage))
async def close_communicator(request: Request) -> Response:
    """Close the connection to the trainer."""
    await read_optional(request, Nothing)
    await run(request, "disconnect")
    return json_response(UpdateMessage("closed"))


async def _add(request: Request, params: list[NamedParam]) -> Response:
    info = {
        "names": [one.name for one in params],
        "dtype_names": [one.dtype for one in params],
        "shapes": [one.shape for one in params],
    }
    await run(request, "add_named", info)
    return json_response(UpdateMessage("received"))
