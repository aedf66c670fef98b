"""Which endpoint families a server offers: those that its one model can do, and a word at the paths of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from quire.config.pooling import PoolingSpec
from quire.errors import ValidationError
from quire.pooling_params import CLASSIFY, EMBED

Offered = Callable[[PoolingSpec | None], bool]
"""Whether a model of this description can do it; None: one that generates."""


def by_any(spec: PoolingSpec | None) -> bool:
    return True


def by_generation(spec: PoolingSpec | None) -> bool:
    return spec is None


def by_pooling(spec: PoolingSpec | None) -> bool:
    return spec is not None


def by_embedding(spec: PoolingSpec | None) -> bool:
    return spec is not None and EMBED in spec.tasks


def by_classes(spec: PoolingSpec | None) -> bool:
    return spec is not None and CLASSIFY in spec.tasks


@dataclass(frozen=True)
class Family:
    """Routes that are offered together."""

    router: APIRouter
    offered: Offered = by_any


def offered_by(families: Iterable[Family], spec: PoolingSpec | None) -> list[APIRouter]:
    """The routers of what the model can do."""
    return [family.router for family in families if family.offered(spec)]


def not_offered_by(families: Iterable[Family], spec: PoolingSpec | None) -> APIRouter:
    """A router that answers at the paths of everything else, and says what there is instead."""
    families = list(families)
    instead = [family for family in families if family.offered is not by_any and family.offered(spec)]
    paths = ", ".join(route.path for family in instead for route in _routes(family.router))
    does = "generates" if spec is None else f"is served for {', '.join(spec.tasks)}"
    router = APIRouter()

    async def refuse(request: Request) -> Response:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        raise ValidationError(f"{path} is not for this model, which {does}; it has {paths}", param="model")

    for family in families:
        for route in [] if family.offered(spec) else _routes(family.router):
            router.add_api_route(
                route.path, refuse, methods=sorted(route.methods or ()), include_in_schema=False
            )
    return router


def _routes(router: APIRouter) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]
