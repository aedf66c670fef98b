# SPDX-License-Identifier: Apache-2.0
"""The web application: routes, middleware and error handlers around one engine.

Invariant: importing this module loads neither torch nor transformers; building the app starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from quire.config import EngineConfig, ServerConfig
from quire.engine.shared_counters import CounterSlot
from quire.entrypoints.openai import (
    chat_completions,
    completions,
    health,
    metrics,
    models,
    requests,
    tokenize,
)
from quire.entrypoints.openai.errors import (
    ANTHROPIC_REQUEST_ID,
    REQUEST_ID,
    handle_http_exception,
    handle_quire_error,
)
from quire.entrypoints.openai.families import (
    EndpointFamily,
    ServerFeature,
    by_generation,
    rejecting_router,
    server_features,
    supported_routers,
)
from quire.entrypoints.openai.in_flight import InFlight
from quire.entrypoints.openai.keys import Keyring, admin_key, api_keys, make_keyring
from quire.entrypoints.openai.middleware.auth import (
    OPEN_PATHS,
    Auth,
    Availability,
    ErrorBoundary,
    HeadAsGet,
    HttpMetrics,
    TrackInFlight,
)
from quire.entrypoints.openai.middleware.body_limit import (
    BodyBudget,
    BodyEncoding,
    BodyLimit,
    BodySizes,
    HeaderLimit,
)
from quire.entrypoints.openai.middleware.quota import RATE_LIMIT_HEADERS, Meters, Quota
from quire.entrypoints.openai.notes import ADJUSTED_HEADER, IGNORED_HEADER
from quire.entrypoints.openai.openapi import pages
from quire.entrypoints.openai.openapi.document import AccessRules, Document
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.state import QueryHandler, ServerState
from quire.errors import QuireError
from quire.features import BROWSER_PAGES
from quire.metrics.catalog import make_family
from quire.metrics.logging import LostLinesCollector
from quire.metrics.prometheus import PrometheusStatLogger
from quire.plugins import import_place

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

GENERATION = ServerFeature(
    families=(
        EndpointFamily(completions.router, by_generation),
        EndpointFamily(chat_completions.router, by_generation),
    )
)
ANY_MODEL = ServerFeature(
    families=(
        EndpointFamily(models.router),
        EndpointFamily(tokenize.router),
        EndpointFamily(requests.router),
        EndpointFamily(health.router),
        EndpointFamily(metrics.router),
    ),
    controls=(requests.controls,),
    queries={
        "load": requests.num_in_flight,
        "explain": requests.explained,
        "list": requests.listed,
        "abort": requests.aborted,
        metrics.QUERY: metrics.measured,
    },
)
FEATURES = (GENERATION, *server_features(), ANY_MODEL)  # Order of the published OpenAPI document.
FAMILIES = tuple(family for feature in FEATURES for family in feature.families)
CONTROLS = tuple(router for feature in FEATURES for router in feature.controls)
QUERY_HANDLERS: dict[str, QueryHandler] = {
    name: handler for feature in FEATURES for name, handler in feature.queries.items()
}
COMMAND_HANDLERS: dict[str, QueryHandler] = {
    name: handler for feature in FEATURES for name, handler in feature.commands.items()
}
ALSO_SERVED = frozenset[str]().union(*(feature.always_served for feature in FEATURES))
EXPOSED_HEADERS = (
    REQUEST_ID,
    ANTHROPIC_REQUEST_ID,
    "retry-after",
    *RATE_LIMIT_HEADERS,
    IGNORED_HEADER,
    ADJUSTED_HEADER,
)  # Response headers that scripts of a web slot may read (CORS).


describe(Operation(other={CONTENT_TYPE_LATEST: {"type": "string"}}))(metrics.metrics)


def build_app(
    engine: AsyncLLM, config: ServerConfig, *, keys: Keyring | None = None, slot: CounterSlot | None = None
) -> FastAPI:
    """Return an app that serves `engine`; the caller starts and stops both.

    Args:
        keys: of the server, where several API processes share it; None: read from `config`.
        slot: slot of this process in the shared counters, where there are several API processes.
    """
    registry = CollectorRegistry()
    disconnects = make_family("http_client_disconnects", registry)
    registry.register(LostLinesCollector())
    keys = keyring(config) if keys is None else keys
    state = ServerState(
        engine, config, registry, keys, InFlight(disconnects.inc), QUERY_HANDLERS, COMMAND_HANDLERS
    )
    meters = Meters(state.keys.tenants, slot=slot)
    engine.add_stat_logger(meters)
    engine.add_stat_logger(_prometheus(state))
    app = FastAPI(
        middleware=_middleware(state, meters),
        # FastAPI's pages load external scripts, and its document lists no errors; ours: openapi/
        openapi_url=None,
    )
    offered = routers(config, engine.config)
    controls = _controls(config)
    app.state.server = state
    app.state.document = Document(offered, controls, _access(state))
    app.add_exception_handler(QuireError, handle_quire_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    for router in (*offered, *controls, rejecting_router(FAMILIES, engine.config)):
        app.include_router(router)
    for feature in FEATURES:
        feature.install(app, state)
    return app


def _controls(config: ServerConfig) -> list[APIRouter]:
    """Return the admin routes; none without an admin key."""
    if not admin_key(config):
        return []
    return [router for feature in FEATURES if feature.is_enabled(config) for router in feature.controls]


def _prometheus(state: ServerState) -> PrometheusStatLogger:
    engine = state.engine.config
    return PrometheusStatLogger(
        state.model_names[0],
        engine.model.max_model_len,
        registry=state.registry,
        first_engine=engine.parallel.first_replica,
        num_engines=engine.parallel.num_served,
    )


def routers(config: ServerConfig, engine_config: EngineConfig) -> list[APIRouter]:
    """Return the routers that the configuration and the model support, without the admin routes."""
    chosen = supported_routers(FAMILIES, engine_config)
    if config.enable_tokenizer_info_endpoint:
        chosen.append(tokenize.info_router)
    return chosen if config.disable_fastapi_docs else [*chosen, pages.router]


def open_paths(config: ServerConfig) -> frozenset[str]:
    """Return the paths that need no API key."""
    return OPEN_PATHS | ({"/metrics"} if config.allow_unauthenticated_metrics else frozenset())


def _access(state: ServerState) -> AccessRules:
    has_limits = any(tenant.has_limits for tenant in state.keys.tenants.values())
    return AccessRules(bool(state.keys), has_limits, open_paths(state.config))


def _middleware(state: ServerState, meters: Meters) -> list[Middleware]:
    config = state.config
    sizes = BodySizes(config)
    layers = [
        Middleware(HttpMetrics, registry=state.registry),
        Middleware(ErrorBoundary, client_ids=state.client_ids),
        Middleware(HeaderLimit),
        Middleware(HeadAsGet),
    ]
    if config.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=["GET", "HEAD", "POST"],
                allow_headers=["*"],  # openai-js sends a dozen of its own
                expose_headers=EXPOSED_HEADERS,
            )
        )
    if config.console:
        browser_pages = map(import_place, BROWSER_PAGES.values())
        layers += [Middleware(each, root_path=config.root_path) for each in browser_pages]
    layers += [
        Middleware(Auth, keys=state.keys, root_path=config.root_path, open_paths=open_paths(config)),
        Middleware(Quota, meters=meters),
        Middleware(
            Availability,
            why_not=lambda: state.unavailable,
            is_draining=lambda: state.draining,
            root_path=config.root_path,
            also_served=ALSO_SERVED,
        ),
        Middleware(TrackInFlight, in_flight=state.in_flight),
        Middleware(
            BodyEncoding,
            sizes=sizes,
            budget=BodyBudget(max(config.max_receiving_bytes, 2 * config.max_request_bytes)),
        ),
        Middleware(BodyLimit, sizes=sizes),
    ]
    return layers


def keyring(config: ServerConfig) -> Keyring:
    """Return the keyring of all keys that the server accepts.

    Raises:
        ConfigError: the API key file is invalid.
    """
    keys, admin = api_keys(config), admin_key(config)
    if admin is not None and admin not in keys and (keys or config.api_key_file):
        keys = (*keys, admin)  # as the only key it would require a key of all clients
    return make_keyring(keys, config.api_key_file)
