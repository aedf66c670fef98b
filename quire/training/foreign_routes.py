# SPDX-License-Identifier: Apache-2.0
"""Routes of training loops under the names of SGLang and of TRL's generation server, for the admin key.

Routes that need pickle, NCCL or CUDA handles are refused. TRL sends each parameter by itself and then resets the prefix
cache. The first opens an update, and the reset finishes it, so that no request is computed with some of them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.state import server_of
from quire.entrypoints.openai.tenant import admin_router
from quire.errors import ConflictError, ValidationError
from quire.training.bracket import MIXED
from quire.training.commands import read_optional, run
from quire.training.protocol import (
    InitCommunicator,
    MemoryOccupation,
    NamedParam,
    NamedParams,
    Nothing,
    PauseGeneration,
    UpdateMessage,
    UpdateSuccess,
    UpdateWeightsFromDisk,
)

controls = admin_router()
PAUSES = {"abort": ("abort", True), "retract": ("keep", True), "in_place": ("keep", False)}
"""SGLang's mode -> mode and whether the cache is cleared."""
INSTEAD = (
    "send a directory (/update_weights_from_disk), shared memory or TCP (/update_weights; docs/training.md)"
)
REFUSED = {
    "/update_weights_from_tensor": "takes pickled tensors, which can run code",
    "/update_weights_from_distributed": "needs an NCCL group",
    "/init_weights_update_group": "needs an NCCL group",
    "/destroy_weights_update_group": "needs an NCCL group",
    "/update_weights_from_ipc": "takes handles of GPU memory",
    "/get_weights_by_name": "would return weights in the checkpoint's form, which the engine does not keep",
}


@controls.post("/update_weights_from_disk")
@describe(Operation(body=(UpdateWeightsFromDisk,), reply=UpdateSuccess, errors=(409,)))
async def update_weights_from_disk(request: Request) -> Response:
    """Use the weights of a directory on the server's machine: a whole update in one call."""
    body = await read_request(request, UpdateWeightsFromDisk)
    mode = "abort" if body.abort_all_requests else "keep" if body.flush_cache else MIXED
    version = await run(request, "load", body.model_path, body.weight_version, mode)
    return json_response(UpdateSuccess(f"weights {version} are in use"))


@controls.post("/pause_generation")
@describe(Operation(body=(PauseGeneration,), reply=UpdateSuccess, errors=(409,)))
async def pause_generation(request: Request) -> Response:
    """Stop computing."""
    body = await read_optional(request, PauseGeneration)
    await run(request, "pause", *PAUSES[body.mode])
    return json_response(UpdateSuccess("paused"))


@controls.post("/continue_generation")
@describe(Operation(body=(Nothing,), reply=UpdateSuccess, errors=(409,)))
async def continue_generation(request: Request) -> Response:
    """Go on computing."""
    await read_optional(request, Nothing)
    await run(request, "resume")
    return json_response(UpdateSuccess("resumed"))


@controls.post("/release_memory_occupation")
@describe(Operation(body=(MemoryOccupation,), reply=UpdateSuccess, errors=(409,)))
async def release_memory_occupation(request: Request) -> Response:
    """Sleep at level 1, which aborts requests in flight; the weights stay in host memory."""
    await read_optional(request, MemoryOccupation)
    await server_of(request).run_command("sleep", 1, "abort")
    return json_response(UpdateSuccess("released"))


@controls.post("/resume_memory_occupation")
@describe(Operation(body=(MemoryOccupation,), reply=UpdateSuccess, errors=(409,)))
async def resume_memory_occupation(request: Request) -> Response:
    """Wake the engine, or parts of it."""
    body = await read_optional(request, MemoryOccupation)
    await server_of(request).run_command("wake_up", body.tags)
    return json_response(UpdateSuccess("resumed"))


@controls.post("/flush_cache")
@describe(Operation(body=(Nothing,), reply=UpdateSuccess, errors=(409,)))
async def flush_cache(request: Request) -> Response:
    """Drop all cached prefixes; 409 while a request is running."""
    await read_optional(request, Nothing)
    if not await server_of(request).engine.reset_prefix_cache():
        raise ConflictError("the prefix cache was not reset: requests are running")
    return json_response(UpdateSuccess("flushed"))


@describe(Operation())
async def refuse(request: Request) -> Response:
    """Refuse an update by pickle, NCCL or handles of GPU memory, and name another way."""
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    raise ValidationError(f"{path} {REFUSED[path]}; {INSTEAD}")


for _path in REFUSED:
    controls.add_api_route(_path, refuse, methods=["POST"], include_in_schema=False)


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
