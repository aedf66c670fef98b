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

from quire.config import ServerConfig
from quire.config.pooling import PoolingSpec
from quire.engine.ledger import Page
from quire.entrypoints import anthropic
from quire.entrypoints.ollama import embed as ollama_embed
from quire.entrypoints.ollama import models as ollama_models
from quire.entrypoints.ollama import routes as ollama_routes
from quire.entrypoints.openai import (
    adapter_routes,
    chat_completions,
    completions,
    front_page,
    health,
    integrity,
    metrics,
    models,
    prefix_cache,
    requests,
    responses,
    sleep,
    tokenize,
)
from quire.entrypoints.openai.errors import (
    ANTHROPIC_REQUEST_ID,
    REQUEST_ID,
    handle_http_exception,
    handle_quire_error,
)
from quire.entrypoints.openai.families import (
    Family,
    by_classes,
    by_embedding,
    by_generation,
    by_pooling,
    not_offered_by,
    offered_by,
)
from quire.entrypoints.openai.in_flight import InFlight
from quire.entrypoints.openai.keys import Keyring, admin_key, api_keys, make_keyring
from quire.entrypoints.openai.middleware.auth import OPEN_PATHS, Auth
from quire.entrypoints.openai.middleware.availability import Availability
from quire.entrypoints.openai.middleware.body_budget import BodyBudget
from quire.entrypoints.openai.middleware.body_encoding import BodyEncoding
from quire.entrypoints.openai.middleware.body_limit import BodyLimit, HeaderLimit
from quire.entrypoints.openai.middleware.boundary import Boundary
from quire.entrypoints.openai.middleware.head import Head
from quire.entrypoints.openai.middleware.http_metrics import HttpMetrics
from quire.entrypoints.openai.middleware.quota import RATE_LIMIT_HEADERS, Meters, Quota
from quire.entrypoints.openai.middleware.visits import Visits
from quire.entrypoints.openai.notes import ADJUSTED_HEADER, IGNORED_HEADER
from quire.entrypoints.openai.openapi import pages
from quire.entrypoints.openai.openapi.document import Document
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.openapi.refusals import Access
from quire.entrypoints.openai.state import Question, ServerState
from quire.entrypoints.pooling import cohere, embeddings, pairs
from quire.errors import QuireError
from quire.metrics.families import make_family
from quire.metrics.log_lines import LostLines
from quire.metrics.prometheus import PrometheusStatLogger

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

FAMILIES = (
    Family(front_page.router),
    Family(completions.router, by_generation),
    Family(chat_completions.router, by_generation),
    Family(responses.router, by_generation),
    Family(embeddings.embedding_router, by_embedding),
    Family(embeddings.pooling_router, by_pooling),
    Family(embeddings.classify_router, by_classes),
    Family(pairs.router, pairs.offered),
    Family(cohere.router, by_embedding),
    Family(ollama_embed.router, by_embedding),
    Family(anthropic.router, by_generation),
    Family(ollama_routes.router, by_generation),
    Family(ollama_models.router),
    Family(models.router),
    Family(tokenize.router),
    Family(requests.router),
    Family(health.router),
    Family(metrics.router),
)
"""In the order of the published document."""
CONTROLS = (
    requests.controls,
    prefix_cache.controls,
    integrity.controls,
    sleep.controls,
    adapter_routes.controls,
)
"""What acts on all requests: for the admin key."""
QUESTIONS: dict[str, Question] = {
    "load": requests.num_in_flight,
    "explain": requests.explained,
    "list": requests.listed,
    "abort": requests.aborted,
    "unfinished": sleep.num_unfinished,
    metrics.QUESTION: metrics.measured,
}
"""What each process of a server can be asked about itself by the others."""
DECISIONS: dict[str, Question] = {
    "sleep": sleep.fall_asleep,
    "wake_up": sleep.wake,
    "load_adapter": adapter_routes.load,
    "unload_adapter": adapter_routes.unload,
    "resolve_adapter": adapter_routes.resolve,
}
"""What the first process of a server does for all."""
EXPOSED_HEADERS = (
    REQUEST_ID,
    ANTHROPIC_REQUEST_ID,
    "retry-after",
    *RATE_LIMIT_HEADERS,
    IGNORED_HEADER,
    ADJUSTED_HEADER,
)
"""What scripts of a page may read of a response besides its body."""


describe(Operation(other={CONTENT_TYPE_LATEST: {"type": "string"}}))(metrics.metrics)


def build_app(
    engine: AsyncLLM, config: ServerConfig, *, keys: Keyring | None = None, page: Page | None = None
) -> FastAPI:
    """An app that serves `engine`; the caller starts and ends both.

    One of several processes of a server is given the keys, and its page of their ledger.
    """
    registry = CollectorRegistry()
    disconnects = make_family("http_client_disconnects", registry)
    registry.register(LostLines())
    keys = keyring(config) if keys is None else keys
    state = ServerState(engine, config, registry, keys, InFlight(disconnects.inc), QUESTIONS, DECISIONS)
    meters = Meters(state.keys.tenants, page=page)
    engine.add_stat_logger(meters)
    engine.add_stat_logger(_prometheus(state))
    app = FastAPI(
        middleware=_middleware(state, meters),
        openapi_url=None,  # FastAPI's pages load scripts from elsewhere, and its document has no errors; ours: openapi/
    )
    spec = engine.config.pooling
    offered, controls = routers(config, spec), CONTROLS if admin_key(config) else ()
    app.state.server = state
    app.state.document = Document(offered, controls, _access(state))
    app.add_exception_handler(QuireError, handle_quire_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    for router in (*offered, *controls, not_offered_by(FAMILIES, spec)):
        app.include_router(router)
    return app


def _prometheus(state: ServerState) -> PrometheusStatLogger:
    engine = state.engine.config
    return PrometheusStatLogger(
        state.model_names[0],
        engine.model.max_model_len,
        registry=state.registry,
        first_engine=engine.parallel.first_replica,
        num_engines=engine.parallel.num_served,
    )


def routers(config: ServerConfig, spec: PoolingSpec | None = None) -> list[APIRouter]:
    """What this configuration offers of such a model, besides the controls."""
    chosen = offered_by(FAMILIES, spec)
    if config.enable_tokenizer_info_endpoint:
        chosen.append(tokenize.info_router)
    return chosen if config.disable_fastapi_docs else [*chosen, pages.router]


def open_paths(config: ServerConfig) -> frozenset[str]:
    """What needs no key where keys are in use."""
    return OPEN_PATHS | ({"/metrics"} if config.allow_unauthenticated_metrics else frozenset())


def _access(state: ServerState) -> Access:
    has_limits = any(tenant.has_limits for tenant in state.keys.tenants.values())
    return Access(bool(state.keys), has_limits, open_paths(state.config))


def _middleware(state: ServerState, meters: Meters) -> list[Middleware]:
    config = state.config
    layers = [
        Middleware(HttpMetrics, registry=state.registry),
        Middleware(Boundary, client_ids=state.client_ids),
        Middleware(HeaderLimit),
        Middleware(Head),
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
    layers += [
        Middleware(
            Auth,
            keys=state.keys,
            root_path=config.root_path,
            open_paths=open_paths(config),
        ),
        Middleware(Quota, meters=meters),
        Middleware(
            Availability,
            why_not=lambda: state.unavailable,
            is_draining=lambda: state.draining,
            root_path=config.root_path,
        ),
        Middleware(Visits, in_flight=state.in_flight),
        Middleware(
            BodyEncoding,
            max_bytes=config.max_request_bytes,
            budget=BodyBudget(max(config.max_receiving_bytes, 2 * config.max_request_bytes)),
        ),
        Middleware(BodyLimit, max_bytes=config.max_request_bytes),
    ]
    return layers


def keyring(config: ServerConfig) -> Keyring:
    """All keys that open the server.

    Raises:
        ConfigError: the file of keys is wrong.
    """
    keys, admin = api_keys(config), admin_key(config)
    if admin is not None and admin not in keys and (keys or config.api_key_file):
        keys = (*keys, admin)  # alone it would close the server to everybody else
    return make_keyring(keys, config.api_key_file)
