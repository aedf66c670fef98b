# SPDX-License-Identifier: Apache-2.0
"""Routes of the server by feature, and selection of those that the model supports.

A feature adds its routes by one `ServerFeature` and one row in `quire.features.SERVER_FEATURES`; the app imports no
feature. Paths that the model does not support answer 400 with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.openai.state import QueryHandler, ServerState
from quire.errors import ValidationError
from quire.features import SERVER_FEATURES
from quire.plugins import import_place
from quire.pooling_params import EMBED

# Predicate on a resolved configuration: whether its model supports the routes.
IsOffered = Callable[[EngineConfig], bool]


def by_any(config: EngineConfig) -> bool:
    return True


def by_generation(config: EngineConfig) -> bool:
    return config.pooling is None


def by_embedding(config: EngineConfig) -> bool:
    return config.pooling is not None and EMBED in config.pooling.tasks


def always(config: ServerConfig) -> bool:
    return True


@dataclass(frozen=True)
class EndpointFamily:
    """Router with the predicate that enables it."""

    router: APIRouter
    offered: IsOffered = by_any


@dataclass(frozen=True)
class ServerFeature:
    """Everything that one feature adds to the server.

    Args:
        families: routers for clients.
        controls: routers that act on all requests; they require the admin key.
        queries: handlers of queries that any API process may send to any other (`ServerState.ask_all`), by name.
        commands: handlers of commands that only the supervisor process executes, for all API processes, by name.
        is_enabled: whether a server with these options has the admin routes.
        install: adds what is no route, such as WebSockets, to an app with its routes.
        always_served: paths that answer while the server takes no requests.
    """

    families: tuple[EndpointFamily, ...] = ()
    controls: tuple[APIRouter, ...] = ()
    queries: Mapping[str, QueryHandler] = field(default_factory=dict)
    commands: Mapping[str, QueryHandler] = field(default_factory=dict)
    is_enabled: Callable[[ServerConfig], bool] = always
    install: Callable[[FastAPI, ServerState], None] = lambda app, state: None
    always_served: frozenset[str] = frozenset()


def families_with(feature: str, router: str, offered: IsOffered) -> tuple[EndpointFamily, ...]:
    """Return a family of routes that another feature computes; none if this installation lacks it.

    Args:
        router: its place ("module:name").
    """
    return (EndpointFamily(import_place(router), offered),) if feature in SERVER_FEATURES else ()


def server_features() -> list[ServerFeature]:
    """Return the features of the table, in its order."""
    return [import_place(place) for place in SERVER_FEATURES.values()]


def supported_routers(families: Iterable[EndpointFamily], config: EngineConfig) -> list[APIRouter]:
    """Return the routers that the model supports."""
    return [family.router for family in families if family.offered(config)]


def rejecting_router(families: Iterable[EndpointFamily], config: EngineConfig) -> APIRouter:
    """Return a router that rejects requests at the paths of all other families and lists the supported ones."""
    families = list(families)
    instead = [family for family in families if family.offered is not by_any and family.offered(config)]
    paths = ", ".join(route.path for family in instead for route in _routes(family.router))
    does = "generates" if config.pooling is None else f"is served for {', '.join(config.pooling.tasks)}"
    router = APIRouter()

    async def refuse(request: Request) -> Response:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        raise ValidationError(
            f"{path} is not supported by this model, which {does}; use {paths}", param="model"
        )

    for family in families:
        for route in [] if family.offered(config) else _routes(family.router):
            router.add_api_route(
                route.path, refuse, methods=sorted(route.methods or ()), include_in_schema=False
            )
    return router


def _routes(router: APIRouter) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]
