"""Selection of the routers that the model supports; other paths answer 400 with a reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from quire.config.pooling import PoolingSpec
from quire.errors import ValidationError
from quire.pooling_params import CLASSIFY, EMBED

# Predicate on the model's pooling description; None: a generative model.
IsOffered = Callable[[PoolingSpec | None], bool]


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
class EndpointFamily:
    """Router with the predicate that enables it."""

    router: APIRouter
    offered: IsOffered = by_any


def supported_routers(families: Iterable[EndpointFamily], spec: PoolingSpec | None) -> list[APIRouter]:
    """Return the routers that the model supports."""
    return [family.router for family in families if family.offered(spec)]


def rejecting_router(
    families: Iterable[EndpointFamily],
    spec: PoolingSpec | None,
    unsupported: Collection[EndpointFamily] = (),
) -> APIRouter:
    """Return a router that rejects requests at the paths of all other families and lists the supported ones.

    Args:
        unsupported: families that the model does not support, whatever their predicate says.
    """
    families = list(families)

    def offers(family: EndpointFamily) -> bool:
        return family not in unsupported and family.offered(spec)

    instead = [family for family in families if family.offered is not by_any and offers(family)]
    paths = ", ".join(route.path for family in instead for route in _routes(family.router))
    does = "generates" if spec is None else f"is served for {', '.join(spec.tasks)}"
    router = APIRouter()

    async def refuse(request: Request) -> Response:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        raise ValidationError(
            f"{path} is not supported by this model, which {does}; use {paths}", param="model"
        )

    for family in families:
        for route in [] if offers(family) else _routes(family.router):
            router.add_api_route(
                route.path, refuse, methods=sorted(route.methods or ()), include_in_schema=False
            )
    return router


def _routes(router: APIRouter) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]
