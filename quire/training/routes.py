# SPDX-License-Identifier: Apache-2.0
"""Routes of training loops under vLLM's names, for the admin key; the feature's row in `SERVER_FEATURES`.

The engine's names come from `quire.training.updates`; SGLang's and TRL's routes are in `foreign_routes`. Replies have
the weight version in a header, if there is an admin key, which alone can change it.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.sleep_state import MODES
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.families import ServerFeature
from quire.entrypoints.openai.keys import admin_key
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.state import ServerState, server_of
from quire.entrypoints.openai.tenant import admin_router
from quire.errors import DeadlineError, ValidationError
from quire.training import foreign_routes
from quire.training.commands import FLAGS, check_options, flag, option, read_optional, run, train
from quire.training.protocol import (
    AbortWeightUpdate,
    Checked,
    CollectiveRPC,
    FinishWeightUpdate,
    InitWeightTransfer,
    Nothing,
    PausedEngine,
    RPCResults,
    StartWeightUpdate,
    Status,
    UpdateStarted,
    UpdateWeights,
    UpdateWeightVersion,
    WeightChecker,
    WeightInfo,
    WorldSize,
)
from quire.training.tensors import check_baseline, compare

HEADER = b"x-weight-version"
BEGAN_HEADER = b"x-weight-version-began"


class VersionHeader:
    """Adds the version of the weights at the reply's first byte, and the one at the request's if that was another."""

    def __init__(self, app: ASGIApp, server: ServerState) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = self._server.engine.weight_version

        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                now = self._server.engine.weight_version
                headers = [(HEADER, now.encode())]
                headers += [(BEGAN_HEADER, began.encode())] if began != now else []
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await self._app(scope, receive, send_with_version)


def add_version_header(app: FastAPI, server: ServerState) -> None:
    """Add the header to an app's replies."""
    if admin_key(server.config):
        app.add_middleware(VersionHeader, server=server)


controls = admin_router()
PAUSE_QUERY: dict[str, dict[str, Any]] = {"mode": {"enum": [*MODES]}, "clear_cache": {"enum": [*FLAGS]}}
WORLD_QUERY: dict[str, dict[str, Any]] = {"include_dp": {"enum": [*FLAGS]}}


@controls.post("/pause")
@describe(Operation(reply=Status, errors=(409,), query=PAUSE_QUERY))
async def pause(request: Request) -> Response:
    """Stop computing: requests in flight are aborted, finished first (`wait`) or kept; with `keep` new ones queue."""
    check_options(request, "mode", "clear_cache")
    await run(request, "pause", option(request, "mode", "abort"), flag(request, "clear_cache"))
    return json_response(Status("paused"))


@controls.post("/resume")
@describe(Operation(reply=Status, errors=(409,)))
async def resume(request: Request) -> Response:
    """Go on computing."""
    check_options(request)
    await run(request, "resume")
    return json_response(Status("resumed"))


@controls.get("/is_paused")
@describe(Operation(reply=PausedEngine))
async def is_paused(request: Request) -> Response:
    """Return whether no steps are planned."""
    check_options(request)
    return json_response(PausedEngine(server_of(request).engine.is_sleeping))


@controls.post("/init_weight_transfer_engine")
@describe(Operation(body=(InitWeightTransfer,), reply=Status))
async def init_weight_transfer_engine(request: Request) -> Response:
    """Connect to a trainer at an address that the operator allows."""
    await run(request, "connect", (await read_request(request, InitWeightTransfer)).init_info)
    return json_response(Status("initialized"))


@controls.post("/shutdown_weight_transfer_engine")
@describe(Operation(body=(Nothing,), reply=Status))
async def shutdown_weight_transfer_engine(request: Request) -> Response:
    """Close the connection to the trainer."""
    await read_optional(request, Nothing)
    await run(request, "disconnect")
    return json_response(Status("shut down"))


@controls.post("/start_weight_update")
@describe(Operation(body=(StartWeightUpdate,), reply=UpdateStarted, errors=(409,)))
async def start_weight_update(request: Request) -> Response:
    """Open a weight update and pause the engine, unless it is paused."""
    body = await read_optional(request, StartWeightUpdate)
    return json_response(UpdateStarted(await run(request, "begin", body.mode)))


@controls.post("/start_draft_weight_update")
@describe(Operation(body=(Nothing,)))
async def start_draft_weight_update(request: Request) -> Response:
    """Refused: a draft model in the same checkpoint is updated with it, another one keeps its weights."""
    raise ValidationError(
        "a draft model of its own keeps its weights; heads in the model's checkpoint are updated with the model"
    )


@controls.post("/update_weights")
@describe(Operation(body=(UpdateWeights,), reply=Status, errors=(409,)))
async def update_weights(request: Request) -> Response:
    """Add tensors to the open update; the old weights stay in use."""
    body = await read_request(request, UpdateWeights)
    await run(request, "update", body.update_info, body.update_id)
    return json_response(Status("updated"))


@controls.post("/finish_weight_update")
@describe(Operation(body=(FinishWeightUpdate,), reply=WeightInfo, errors=(409,)))
async def finish_weight_update(request: Request) -> Response:
    """Use the new weights in all workers; on an error the old ones stay in all, and the update ends, too."""
    body = await read_optional(request, FinishWeightUpdate)
    return json_response(WeightInfo(await run(request, "finish", body.weight_version, body.update_id)))


@controls.post("/abort_weight_update")
@describe(Operation(body=(AbortWeightUpdate,), reply=Status, errors=(409,)))
async def abort_weight_update(request: Request) -> Response:
    """Drop the open update; the old weights stay."""
    await run(request, "abort", (await read_optional(request, AbortWeightUpdate)).update_id)
    return json_response(Status("aborted"))


@controls.post("/update_weight_version")
@describe(Operation(body=(UpdateWeightVersion,), reply=WeightInfo))
async def update_weight_version(request: Request) -> Response:
    """Set the version of the weights in use."""
    body = await read_request(request, UpdateWeightVersion)
    await run(request, "rename", body.new_version)
    return json_response(WeightInfo(body.new_version))


@controls.get("/weight_info")
@describe(Operation(reply=WeightInfo))
async def weight_info(request: Request) -> Response:
    """Return the version of the weights in use; every reply has it in the header `x-weight-version`."""
    check_options(request)
    return json_response(WeightInfo(server_of(request).engine.weight_version))


@controls.post("/weight_checker")
@controls.post("/weights_checker")
@describe(Operation(body=(WeightChecker,), reply=Checked))
async def weight_checker(request: Request) -> Response:
    """Return SHA-256 checksums of the weights in their final form, or compare them with a baseline."""
    body = await read_request(request, WeightChecker)
    if body.action == "reset":
        raise ValidationError(
            "reset would leave weights that are none; an update replaces all or none", param="action"
        )
    now = await run(request, "checksums")
    if body.action == "checksum":
        return json_response(Checked(now))
    mismatches = compare(now, check_baseline(body.baseline))
    return json_response(Checked(match=not mismatches, mismatches=mismatches))


@controls.get("/get_world_size")
@controls.get("/get_world_size/")
@describe(Operation(reply=WorldSize, query=WORLD_QUERY))
async def get_world_size(request: Request) -> Response:
    """Return the number of ranks, of all replicas unless `include_dp` is false."""
    check_options(request, "include_dp")
    parallel = server_of(request).engine.config.parallel
    num_replicas = parallel.num_replicas if flag(request, "include_dp") else 1
    return json_response(WorldSize(parallel.num_ranks * num_replicas))


@controls.post("/collective_rpc")
@describe(Operation(body=(CollectiveRPC,), reply=RPCResults, errors=(504,)))
async def collective_rpc(request: Request) -> Response:
    """Call a method of the operator's extension class on every worker, between steps."""
    body, engine = await read_request(request, CollectiveRPC), server_of(request).engine
    try:
        results = await engine.collective_rpc(body.method, body.timeout, body.args, body.kwargs)
    except TimeoutError:
        raise DeadlineError(f"the workers have not returned within {body.timeout:g} s; they go on") from None
    return json_response(RPCResults(results))


ROUTERS = (controls, foreign_routes.controls)
FEATURE = ServerFeature(
    controls=ROUTERS,
    commands={"train": train},
    install=add_version_header,
    always_served=frozenset(
        route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)
    ),
)
