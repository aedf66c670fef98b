# SPDX-License-Identifier: Apache-2.0
"""The router's web application: its own routes, and all others for the models' servers.

Invariant: no route waits for a model but those that are passed on. Own routes with `?model=` that ask for a server's
state are passed on, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from quire import __version__
from quire.config import ModelRouterConfig, ServerConfig
from quire.entrypoints.anthropic.messages import limit_of, model_of, page_of
from quire.entrypoints.ollama.models import FOREVER, OLLAMA_VERSION
from quire.entrypoints.ollama.protocol import Details, ListedModel, OllamaModelList, OllamaVersion
from quire.entrypoints.openai.errors import (
    ANTHROPIC_REQUEST_ID,
    ANTHROPIC_VERSION,
    REQUEST_ID,
    handle_http_exception,
    handle_quire_error,
    json_response,
)
from quire.entrypoints.openai.in_flight import InFlight
from quire.entrypoints.openai.keys import ClientIds
from quire.entrypoints.openai.middleware.auth import (
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
from quire.errors import ConfigError, ConflictError, QuireError, UnavailableError, ValidationError
from quire.features import BROWSER_PAGES
from quire.metrics.catalog import make_family
from quire.metrics.logging import LostLinesCollector
from quire.model_router.access import Access
from quire.model_router.forwarding import Forwarder
from quire.model_router.models_file import ModelEntry, Models
from quire.model_router.planner import ModelPhase, ModelState
from quire.model_router.requests import entry_of
from quire.model_router.router import ModelRouter
from quire.plugins import import_place

logger = logging.getLogger(__name__)

CREATED = int(time.time())
KEEP_ALIVE_S = 15.0  # Silence after which the stream of events gets a comment.
SHOWN = {
    ModelPhase.FAILED: "unloaded",
    ModelPhase.WAKING: "loading",
    ModelPhase.SUSPENDING: "sleeping",
    ModelPhase.UNLOADING: "unloaded",
}  # States that llama.cpp's clients do not know -> the ones that they do.


class ModelStatus(msgspec.Struct, kw_only=True):
    """State of a model, in llama.cpp's words and in the router's (`state`)."""

    value: str
    state: str
    failed: bool = False
    error: str | UnsetType = UNSET
    num_running: int
    num_waiting: int
    memory_bytes: int | None


class RoutedModel(msgspec.Struct, kw_only=True):
    """Entry of /v1/models and /models; an alias has its model as `root`."""

    id: str
    object: Literal["model"] = "model"
    created: int = CREATED
    owned_by: str = "quire"
    root: str
    aliases: list[str]
    status: ModelStatus


class RoutedModels(msgspec.Struct):
    data: list[RoutedModel]
    object: Literal["list"] = "list"


class Success(msgspec.Struct):
    """Reply of llama.cpp's routes that change a model's state."""

    success: bool = True


class RouterFrontPage(msgspec.Struct):
    quire: str
    models: list[str]


class ModelEvent(msgspec.Struct):
    """Event of /models/sse."""

    model: str
    event: Literal["model_status"]
    data: ModelStatus


class RouterApp:
    """Routes of the router and what they share.

    Attributes:
        keys: whether requests need keys, as the HTTP server asks.
        draining: whether the server is ending.
    """

    def __init__(
        self,
        router: ModelRouter,
        config: ServerConfig,
        settings: ModelRouterConfig,
        registry: CollectorRegistry,
        read: Callable[[], Models],
    ) -> None:
        self.router = router
        self._read = read
        self._reloading = asyncio.Lock()
        self.config = config
        self.keys = Access(config, router.models)
        self.registry = registry
        registry.register(LostLinesCollector())
        self.in_flight = InFlight(make_family("http_client_disconnects", registry).inc)
        self.draining = False
        self.forwarder = Forwarder(router, self.keys, self.in_flight, autoload=settings.models_autoload)

    def build(self) -> FastAPI:
        """Return the application."""
        app = FastAPI(middleware=self._middleware(), openapi_url=None)
        app.state.server = self
        app.add_exception_handler(QuireError, handle_quire_error)
        app.add_exception_handler(HTTPException, handle_http_exception)
        app.router.routes.extend(self._routes())
        return app

    def _routes(self) -> list[Route]:
        get, post = self._own("GET"), self._own("POST")
        state = self._own("GET", of_model=True)
        return [
            get("/", self.front),
            get("/v1/models", self.list_models),
            get("/v1/models/", self.list_models),
            get("/v1/models/{name:path}", self.show_model),
            get("/models", self.list_models),
            get("/models/sse", self.events),
            post("/models/reload", self.reload),
            post("/models/load", self.load),
            post("/models/unload", self.unload),
            get("/api/tags", self.tags),
            get("/api/ps", self.processes),
            get("/api/version", self.ollama_version),
            state("/version", self.version),
            state("/metrics", self.metrics, is_open=self.config.allow_unauthenticated_metrics),
            *(state(path, self.ready, is_open=True) for path in ("/health", "/readyz", "/ping", "/livez")),
            _Route("/{path:path}", self.forwarder),
        ]

    def _own(self, method: str, *, of_model: bool = False) -> Callable[..., Route]:
        """Return a function that makes routes of the router itself, which need a key unless they are open."""

        def route(
            path: str, answer: Callable[[Request], Awaitable[Response]], *, is_open: bool = False
        ) -> Route:
            return _Route(path, _Endpoint(self, answer, of_model=of_model, is_open=is_open), methods=[method])

        return route

    def _middleware(self) -> list[Middleware]:
        config = self.config
        layers = [
            Middleware(HttpMetrics, registry=self.registry),
            Middleware(ErrorBoundary, client_ids=ClientIds()),
            Middleware(HeaderLimit),
            Middleware(HeadAsGet),
        ]
        if config.allowed_origins:
            layers.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(config.allowed_origins),
                    allow_methods=["GET", "HEAD", "POST"],
                    allow_headers=["*"],
                    expose_headers=(REQUEST_ID, ANTHROPIC_REQUEST_ID, "retry-after"),
                )
            )
        if config.console:
            browser_pages = map(import_place, BROWSER_PAGES.values())
            layers += [Middleware(each, root_path=config.root_path) for each in browser_pages]
        budget = BodyBudget(max(config.max_receiving_bytes, 2 * config.max_request_bytes))
        sizes = BodySizes(config)
        return [
            *layers,
            Middleware(
                Availability,
                why_not=lambda: "the server is shutting down" if self.draining else None,
                is_draining=lambda: self.draining,
                root_path=config.root_path,
            ),
            Middleware(TrackInFlight, in_flight=self.in_flight),
            Middleware(BodyEncoding, sizes=sizes, budget=budget),
            Middleware(BodyLimit, sizes=sizes),
        ]

    # Models

    async def list_models(self, request: Request) -> Response:
        """List all models and aliases with their states; in Anthropic's form for its clients."""
        if request.query_params.get("reload") in ("1", "true"):  # llama.cpp's
            await self._reload(request)
        entries = self._visible(request)
        if ANTHROPIC_VERSION in request.headers:
            limit = limit_of(request.query_params)
            models = [
                model_of(name, CREATED, self._context_of(entry))
                for entry in entries
                for name in (entry.name, *entry.other_names)
            ]
            return json_response(page_of(models, request.query_params, limit))
        return json_response(RoutedModels([card for entry in entries for card in self._cards(entry)]))

    async def show_model(self, request: Request) -> Response:
        """Show one model."""
        name = request.path_params["name"]
        entry = entry_of(self.router.models, name)
        self.keys.check_model(request.headers, entry)
        if ANTHROPIC_VERSION in request.headers:
            return json_response(model_of(name, CREATED, self._context_of(entry)))
        return json_response(self._card(entry, name))

    async def reload(self, request: Request) -> Response:
        """Read the models file again; the reply lists the models."""
        await self._reload(request)
        return await self.list_models(request)

    async def _reload(self, request: Request) -> None:
        self.keys.check_operator(request.headers)
        async with self._reloading:
            try:
                models = await asyncio.to_thread(self._read)
            except ConfigError as error:
                logger.error("the models are not reloaded: %s", error)
                raise ConflictError(
                    "the models are as before: what --models names has a mistake; the server's log says where"
                ) from None
            self.keys.reload(models)
            self.router.reload(models)
        logger.info("the models were reloaded: %s", ", ".join(models.entries))

    async def load(self, request: Request) -> Response:
        """Load a model; the reply does not wait for it."""
        self.router.load((await self._named(request)).name)
        return json_response(Success())

    async def unload(self, request: Request) -> Response:
        """Unload a model as soon as no request uses it."""
        self.router.unload((await self._named(request)).name)
        return json_response(Success())

    async def events(self, request: Request) -> Response:
        """Stream changes of the models' states, beginning with all present ones."""
        return StreamingResponse(self._events(self._visible(request)), media_type="text/event-stream")

    async def _events(self, entries: Sequence[ModelEntry]) -> AsyncIterator[bytes]:
        names = {entry.name for entry in entries}
        async with self.router.events() as events:
            for name in sorted(names):
                yield self._event(name, self.router.state(name).status)
            while not self.draining:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        name, status = await events.get()
                except TimeoutError:
                    yield b":\n\n"
                    continue
                if name in names and name in self.router.models.entries:  # it was not removed meanwhile
                    yield self._event(name, status)

    def _event(self, name: str, status: ModelPhase) -> bytes:
        event = ModelEvent(name, "model_status", self._status(self.router.state(name), status))
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    async def _named(self, request: Request) -> ModelEntry:
        """Return the model that the body of a request names."""
        try:
            fields = msgspec.json.decode(await request.body(), type=dict[str, Any])
        except msgspec.DecodeError:
            raise ValidationError('the body must be JSON such as {"model": "name"}') from None
        name = fields.get("model")
        if not isinstance(name, str):
            raise ValidationError("model must be text", param="model")
        entry = entry_of(self.router.models, name)
        self.keys.check_model(request.headers, entry)
        return entry

    def _visible(self, request: Request) -> list[ModelEntry]:
        entries = self.router.models.entries.values()
        return [entry for entry in entries if self.keys.may_see(request.headers, entry)]

    def _cards(self, entry: ModelEntry) -> list[RoutedModel]:
        return [self._card(entry, name) for name in (entry.name, *entry.other_names)]

    def _card(self, entry: ModelEntry, name: str) -> RoutedModel:
        state = self.router.state(entry.name)
        aliases = list(entry.aliases) if name == entry.name else []
        return RoutedModel(
            id=name, root=entry.name, aliases=aliases, status=self._status(state, state.status)
        )

    def _status(self, state: ModelState, status: ModelPhase) -> ModelStatus:
        has_failed = status is ModelPhase.FAILED
        return ModelStatus(
            value=SHOWN.get(status, status.value),
            state=status.value,
            failed=has_failed,
            error=state.error if has_failed else UNSET,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            memory_bytes=None if state.size is None else state.size.needed_bytes,
        )

    def _context_of(self, entry: ModelEntry) -> int:
        estimate = self.router.estimate_of(entry.name)
        return 0 if estimate is None else estimate.max_model_len

    # Ollama

    async def tags(self, request: Request) -> Response:
        """List all models and aliases."""
        entries = self._visible(request)
        listed = [self._listed(entry, name) for entry in entries for name in (entry.name, *entry.other_names)]
        return json_response(OllamaModelList(listed))

    async def processes(self, request: Request) -> Response:
        """List the models in memory, with their sizes and the times at which they are unloaded."""
        listed = []
        for entry in self._visible(request):
            state = self.router.state(entry.name)
            if state.has_processes:
                model = self._listed(entry, entry.name)
                model.expires_at, model.size_vram = _expiry(state), 0
                model.context_length = self._context_of(entry)
                listed.append(model)
        return json_response(OllamaModelList(listed))

    async def ollama_version(self, request: Request) -> Response:
        return json_response(OllamaVersion(OLLAMA_VERSION, __version__))

    def _listed(self, entry: ModelEntry, name: str) -> ListedModel:
        size = self.router.state(entry.name).size
        return ListedModel(
            name=name,
            model=name,
            modified_at=datetime.fromtimestamp(CREATED, UTC).isoformat().replace("+00:00", "Z"),
            size=0 if size is None else size.needed_bytes,
            digest=hashlib.sha256(name.encode()).hexdigest(),
            details=Details("", [], ""),
        )

    # The server

    async def front(self, request: Request) -> Response:
        return json_response(RouterFrontPage(__version__, [entry.name for entry in self._visible(request)]))

    async def version(self, request: Request) -> Response:
        return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def ready(self, request: Request) -> Response:
        """200 unless the server is ending, whatever the models do; /livez until the end."""
        if self.draining and not request.url.path.endswith("/livez"):
            raise UnavailableError("the server is shutting down")
        return Response()


class _Endpoint:
    """Own route of the router, as an ASGI application."""

    def __init__(
        self,
        app: RouterApp,
        answer: Callable[[Request], Awaitable[Response]],
        *,
        of_model: bool,
        is_open: bool,
    ) -> None:
        self._app = app
        self._answer = answer
        self._of_model = of_model
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if self._of_model and "model" in request.query_params:
            await self._app.forwarder(scope, receive, send)
            return
        if not self._is_open:
            self._app.keys.check_any(Headers(scope=scope))
        response = await self._answer(request)
        await response(scope, receive, send)


class _Route(Route):
    """Route that tells the metrics which one it is."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, {**child_scope, "route": self}


def _expiry(state: ModelState) -> str:
    """Return the time of day at which a model is unloaded, in Ollama's format."""
    after_s = state.expires_at - time.monotonic()
    if state.running or after_s > timedelta(days=365 * 100).total_seconds():
        return FOREVER
    at = datetime.now(UTC) + timedelta(seconds=max(0.0, after_s))
    return at.isoformat().replace("+00:00", "Z")
