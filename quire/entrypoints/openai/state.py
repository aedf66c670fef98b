# SPDX-License-Identifier: Apache-2.0
"""`ServerState`, shared by the routes, and `BoundedThreads`, which runs untrusted code (chat templates) off the event
loop.

Invariant: one `ServerState` per app; `draining` only changes from False to True. Neither the caller nor process exit
waits longer than a bounded thread's limit. A template that exceeds it ends at its next operation (see
`RenderingThread`). Idle threads are reused, since starting one would block the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from quire.adapters import AdapterRequest, adapter_error
from quire.config import ServerConfig
from quire.entrypoints.chat.environment import RenderingThread, TimeIsUpError
from quire.entrypoints.chat.formats.selection import choose
from quire.entrypoints.chat.media import MediaGate
from quire.entrypoints.chat.messages import MediaTexts
from quire.entrypoints.openai.adapter_serving import AdapterServing, adapter_serving
from quire.entrypoints.openai.in_flight import InFlight
from quire.entrypoints.openai.keys import ClientIds, Keyring
from quire.entrypoints.text_form import FormOptions, TextForm, TextForms
from quire.errors import ConfigError, NotFoundError
from quire.io_processors import IOProcessor, make_io_processor

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 8
LIMIT_S = 30.0
MAX_RETRY_S = 60


class BoundedThreads:
    """Runs functions in a limited number of threads, each for at most `limit_s` seconds.

    A function beyond its limit is abandoned; what it may do then without end is to render a template, which stops.
    `asyncio.to_thread` cannot be used: the loop's shutdown and process exit wait for its threads.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._free = asyncio.Semaphore(MAX_THREADS)
        self._idle: list[_Worker] = []
        weakref.finalize(self, _dismiss, self._idle)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result, or raise its exception.

        Raises:
            TimeoutError: it exceeds the limit, counted from its start.
        """
        async with self._free:
            result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            worker = self._idle.pop() if self._idle else _Worker()
            worker.begin(result, lambda: function(*args, **kwargs))
            try:
                # Not `wait_for`, which in Python 3.11 drops a cancellation that arrives together with the result.
                async with asyncio.timeout(self.limit_s):
                    return await result
            finally:
                if worker.interrupt():
                    self._idle.append(worker)


def _dismiss(workers: list[_Worker]) -> None:
    """Stop idle threads once their owner is collected."""
    for worker in workers:
        worker.end()


class _Worker(RenderingThread):
    """Thread that runs one function at a time and puts results into futures, until it is interrupted.

    While idle it holds no reference to the event loop: the loop's signal handlers refer to the owner of all threads,
    which then could never be collected, and the thread would never end.
    """

    def __init__(self) -> None:
        super().__init__(name="quire-bounded", daemon=True)
        self._lock = threading.Lock()
        self._works = False
        self._work: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def begin(self, result: asyncio.Future[T], function: Callable[[], T]) -> None:
        """Run this function; the previous one has returned."""
        self._works = True
        self._work.put((result, function))
        if self.ident is None:
            self.start()

    def interrupt(self) -> bool:
        """Stop waiting. Return True if the function has returned; otherwise the thread ends with it, if not before."""
        with self._lock:
            self.is_interrupted = self._works
            return not self._works

    def end(self) -> None:
        """End the thread once it is idle."""
        self._work.put(None)

    def run(self) -> None:
        try:
            while self._do_next():
                pass
        except (TimeIsUpError, RuntimeError):  # interrupted; or the loop was closed meanwhile
            return

    def _do_next(self) -> bool:
        """Run the next function; False at the end. In its own frame, so that an idle thread keeps no request alive."""
        work = self._work.get()
        if work is not None:
            self._do(*work)
        return work is not None and not self.is_interrupted

    def _do(self, result: asyncio.Future[T], function: Callable[[], T]) -> None:
        try:
            value = function()
        except Exception as error:
            self._hand_over(result, result.set_exception, error)
        else:
            self._hand_over(result, result.set_result, value)

    def _hand_over(self, result: asyncio.Future[Any], set_outcome: Callable[[Any], None], value: Any) -> None:
        with self._lock:
            self._works = False
        result.get_loop().call_soon_threadsafe(_set_unless_done, result, set_outcome, value)


def _set_unless_done(result: asyncio.Future[Any], set_outcome: Callable[[Any], None], value: Any) -> None:
    """Set a future's result in the event loop, unless its waiter has gone."""
    if not result.done():
        set_outcome(value)


class QueryHandler(Protocol):
    """Handler of a query between API processes; returns serializable data."""

    async def __call__(self, server: ServerState, /, *args: Any) -> Any: ...


class ApiProcesses(Protocol):
    """All API processes of the server."""

    async def ask(self, query: str, *args: Any) -> list[Any]:
        """Return every process's answer, the supervisor's first."""

    async def run_command(self, command: str, *args: Any) -> Any:
        """Let the supervisor process execute this command; returns its result."""

    async def share_adapters(self, adapters: Mapping[str, AdapterRequest]) -> None:
        """Send the served adapters to the other processes; called in the supervisor process only."""


@dataclass(eq=False)
class ServerState:
    """The engine, the configuration, and state derived from them.

    `query_handlers` handle queries to each process, `command_handlers` commands for the supervisor process. `siblings`
    are all processes; None if this is the only one.
    """

    engine: AsyncLLM
    config: ServerConfig
    registry: CollectorRegistry
    keys: Keyring
    in_flight: InFlight
    query_handlers: Mapping[str, QueryHandler] = field(default_factory=dict)
    command_handlers: Mapping[str, QueryHandler] = field(default_factory=dict)
    siblings: ApiProcesses | None = None
    renders: BoundedThreads = field(init=False)  # Runs the chat templates of requests.
    media: MediaGate = field(init=False)
    adapters: Mapping[str, AdapterRequest] = field(init=False)  # By served name.
    adapter_changes: AdapterServing = field(init=False)  # Used by the process that decides for all.
    # Compiles new chat templates, with a longer limit, since the machine may be busy.
    preparation: BoundedThreads = field(default_factory=BoundedThreads)
    client_ids: ClientIds = field(default_factory=ClientIds)
    draining: bool = False
    io_processor: IOProcessor | None = field(init=False)
    closers: list[Callable[[], None]] = field(
        default_factory=list
    )  # Of what routes have opened, such as folders.

    def close(self) -> None:
        """Close what routes have opened; the server takes no requests any more."""
        while self.closers:
            self.closers.pop()()

    def __post_init__(self) -> None:
        self.io_processor = make_io_processor(self.engine.config)
        self.media = MediaGate(self.engine.config, max_sound_bytes=self.config.max_audio_bytes)
        options = _form_options(self.config, self.media.texts)
        self._forms = TextForms(self.engine.input_processor.tokenizers.model, options)
        self.renders = BoundedThreads(self.config.chat_template_timeout)
        serving = adapter_serving()
        self.adapters = serving.named(self.engine.config, self.config, self.model_names)
        self.adapter_changes = serving(self.engine, self, self.config)

    @property
    def unavailable(self) -> str | None:
        """Reason why no generation can start now; None if it can."""
        if self.engine.errored:
            return "the engine has stopped"
        if self.draining:
            return "the server is shutting down"
        if self.engine.refuses_requests:
            return "the engine is asleep or paused and takes no requests until it is woken or resumed"
        if self.engine.is_ready:
            return None
        loading = self.engine.loading
        return "the model is loading, or the engine does not answer" if loading is None else str(loading)

    @property
    def retry_after(self) -> int:
        """Seconds after which a probe may ask again: what is left of loading, if known."""
        loading = None if self.engine.is_ready else self.engine.loading
        left_s = None if loading is None else loading.seconds_left
        return 1 if left_s is None else min(max(math.ceil(left_s), 1), MAX_RETRY_S)

    @property
    def model_names(self) -> tuple[str, ...]:
        model = self.engine.config.model
        return model.served_model_name or (model.model,)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that a request may give as its model: the base model's and the adapters'."""
        return (*self.model_names, *self.adapters)

    @property
    def form(self) -> TextForm:
        """Text form of the base model."""
        return self._forms.model

    async def form_of(self, adapter: AdapterRequest | None) -> TextForm:
        """Return the text form of an adapter's requests, or the base model's.

        Raises:
            ValidationError: the adapter's tokenizer or chat template is unusable.
        """
        form = self._forms.of(await self.engine.get_tokenizer_context(adapter))
        if adapter is not None and form is not self.form and not form.is_made:
            try:
                await self._make(form)
            except ConfigError as error:
                raise adapter_error(f"adapter {adapter.name!r}: {error}") from None
        return form

    async def form_named(self, model: str | None) -> TextForm:
        """Return the text form of a model by name. Raises as `form_of`."""
        return await self.form_of(self.adapters.get(model or ""))

    async def _make(self, form: TextForm) -> None:
        """Prepare a text form.

        Raises:
            ConfigError: the chat template is invalid or exceeds the time limit, or a parser does not exist.
        """
        try:
            await self.preparation.run(form.make)
        except TimeoutError:
            limit = self.preparation.limit_s
            raise ConfigError(
                f"the chat template takes longer than {limit:g} s for one short message"
            ) from None

    @functools.cached_property
    def idle_fields(self) -> frozenset[str]:
        """Fields without meaning in this configuration.

        `user` is a tenant only for a fair scheduler without keys, and blocks move only with --kv-transfer-config.
        """
        config = self.engine.config
        shares = config.scheduler.scheduling_policy == "fair" and not self.keys
        transfers = config.kv_store.transfer is not None
        used = {"user": shares, "kv_transfer_params": transfers}
        return frozenset(name for name, is_used in used.items() if not is_used)

    async def answer(self, query: str, *args: Any) -> Any:
        """Return this process's answer."""
        return await self.query_handlers[query](self, *args)

    async def ask_all(self, query: str, *args: Any) -> list[Any]:
        """Return the answers of all API processes; unreachable ones are left out."""
        if self.siblings is None:
            return [await self.answer(query, *args)]
        return await self.siblings.ask(query, *args)

    async def execute_command(self, command: str, *args: Any) -> Any:
        """Execute a command in this process, for all; returns its result, serializable data.

        Raises:
            QuireError: it failed.
        """
        return await self.command_handlers[command](self, *args)

    async def run_command(self, command: str, *args: Any) -> Any:
        """Execute a command in the supervisor process. Raises as `execute_command` does."""
        run = self.execute_command if self.siblings is None else self.siblings.run_command
        return await run(command, *args)

    async def prepare(self) -> None:
        """Report errors of the chat template at start-up, not at the first request.

        Raises:
            ConfigError: the template is invalid or exceeds the time limit, or a parser does not exist.
        """
        choose(
            self.config.tool_call_parser, self.config.reasoning_parser, None
        )  # check the names whether or not the model has the feature
        defaults = self.config.default_chat_template_kwargs
        if self.form.has_chat:
            await self._make(self.form)
            self.form.chat_template.check_defaults(defaults)
            logger.info("%s", self.form.answer_format.formats.describe())
        elif defaults:
            raise ConfigError("--default-chat-template-kwargs needs a model with a chat template")

    async def share_adapters(self, adapters: Mapping[str, AdapterRequest]) -> None:
        """Serve these adapters in all processes; called in the supervisor process only."""
        self.adapters = adapters
        if self.siblings is not None:
            await self.siblings.share_adapters(adapters)

    async def find_adapter(self, name: str | None) -> None:
        """Load an adapter that is not served yet, if a resolver finds it by the model's name.

        Raises:
            ValidationError: it is unusable.
        """
        if name and name not in self.served_names and self.adapter_changes.may_resolve(name):
            await self.run_command("resolve_adapter", name)

    def check_model(self, name: str | None) -> str:
        """Return the model name for the answer; an absent or empty name means the served model.

        Raises:
            NotFoundError: the server does not serve `name`.
        """
        if not name:
            return self.model_names[0]
        if name not in self.served_names:
            served = ", ".join(self.served_names)
            raise NotFoundError(
                f"the model {name!r:.100} does not exist; this server serves: {served}", param="model"
            )
        return name


def server_of(request: Request) -> ServerState:
    """Return the state of the app that serves `request`."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


def _form_options(config: ServerConfig, media: MediaTexts | None) -> FormOptions:
    return FormOptions(
        config.chat_template,
        config.chat_template_content_format,
        config.tool_call_parser,
        config.reasoning_parser,
        media=media,
    )
