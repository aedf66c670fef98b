"""`ServerState`: what the routes share.

Invariant: one instance per app; `draining` only ever goes from False to True.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from quire.config import ServerConfig
from quire.entrypoints.chat.formats.choice import choose
from quire.entrypoints.openai.adapter_changes import AdapterChanges, make_resolvers
from quire.entrypoints.openai.adapters import may_be_name, named_adapters
from quire.entrypoints.openai.bounded_threads import BoundedThreads
from quire.entrypoints.openai.client_ids import ClientIds
from quire.entrypoints.openai.in_flight import InFlight
from quire.entrypoints.openai.keys import Keyring
from quire.entrypoints.text_form import FormOptions, TextForm, TextForms
from quire.errors import ConfigError, NotFoundError, ValidationError
from quire.io_processors import IOProcessor, make_io_processor
from quire.lora_request import LoRARequest

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM


class Question(Protocol):
    """Answers in data that can be sent to another process."""

    async def __call__(self, server: ServerState, /, *args: Any) -> Any: ...


class Siblings(Protocol):
    """All processes of the server."""

    async def ask(self, question: str, *args: Any) -> list[Any]:
        """What each of them says, the first process's word first."""

    async def decide(self, decision: str, *args: Any) -> None:
        """Have the first process carry this out."""

    async def share_adapters(self, adapters: Mapping[str, LoRARequest]) -> None:
        """Have the other processes serve these; only the first process says so."""


@dataclass(eq=False)
class ServerState:
    """The engine, the configuration, and what is derived from them once.

    `questions` are what each process of the server can be asked about itself, `decisions` what the first one does for
    all, and `siblings` all processes; None if this is the only one.
    """

    engine: AsyncLLM
    config: ServerConfig
    registry: CollectorRegistry
    keys: Keyring
    in_flight: InFlight
    questions: Mapping[str, Question] = field(default_factory=dict)
    decisions: Mapping[str, Question] = field(default_factory=dict)
    siblings: Siblings | None = None
    renders: BoundedThreads = field(init=False)
    """For the chat template of requests."""
    adapters: Mapping[str, LoRARequest] = field(init=False)
    """By the names under which they are served."""
    adapter_changes: AdapterChanges = field(init=False)
    """For the process that decides for all."""
    preparation: BoundedThreads = field(default_factory=BoundedThreads)
    """For chat templates that are new, when the machine may have much to do."""
    client_ids: ClientIds = field(default_factory=ClientIds)
    draining: bool = False
    io_processor: IOProcessor | None = field(init=False)

    def __post_init__(self) -> None:
        self.io_processor = make_io_processor(self.engine.config)
        self._forms = TextForms(self.engine.input_processor.lexicons.model, _form_options(self.config))
        self.renders = BoundedThreads(self.config.chat_template_timeout)
        self.adapters = named_adapters(self.config.lora_modules, self.engine.config, self.model_names)
        resolvers = make_resolvers(self.engine.config, self.config)
        self.adapter_changes = AdapterChanges(self.engine, self, resolvers)

    @property
    def unavailable(self) -> str | None:
        """Why no generation can start now; None if it can."""
        if self.engine.errored:
            return "the engine has stopped"
        if self.draining:
            return "the server is shutting down"
        if self.engine.is_sleeping:
            return "the engine sleeps and takes no requests until it is woken"
        return None if self.engine.is_ready else "the model is loading, or the engine does not answer"

    @property
    def model_names(self) -> tuple[str, ...]:
        model = self.engine.config.model
        return model.served_model_name or (model.model,)

    @property
    def served_names(self) -> tuple[str, ...]:
        """What a request may name as its model: the base model's names, and the adapters'."""
        return (*self.model_names, *self.adapters)

    @property
    def form(self) -> TextForm:
        """What the texts of the base model look like."""
        return self._forms.model

    async def form_of(self, adapter: LoRARequest | None) -> TextForm:
        """What the texts of an adapter's requests look like, or of the base model's.

        Raises:
            ValidationError: the adapter's tokenizer or chat template cannot be used.
        """
        form = self._forms.of(await self.engine.lexicon_of(adapter))
        if adapter is not None and form is not self.form and not form.is_made:
            try:
                await self._make(form)
            except ConfigError as error:
                raise ValidationError(
                    f"adapter {adapter.lora_name!r}: {error}", param="lora_request"
                ) from None
        return form

    async def form_named(self, model: str | None) -> TextForm:
        """That of a model by its name. Raises as `form_of`."""
        return await self.form_of(self.adapters.get(model or ""))

    async def _make(self, form: TextForm) -> None:
        """Raises ConfigError: the chat template is not valid, or runs for ever, or a parser is named that is none."""
        try:
            await self.preparation.run(form.make)
        except TimeoutError:
            limit = self.preparation.limit_s
            raise ConfigError(
                f"the chat template takes longer than {limit:g} s for one short message"
            ) from None

    @functools.cached_property
    def idle_fields(self) -> frozenset[str]:
        """Fields that mean nothing as this server is configured: `user` is a tenant only if no key is."""
        shares = self.engine.config.scheduler.scheduling_policy == "fair" and not self.keys
        return frozenset() if shares else frozenset({"user"})

    async def answer(self, question: str, *args: Any) -> Any:
        """What this process says."""
        return await self.questions[question](self, *args)

    async def everywhere(self, question: str, *args: Any) -> list[Any]:
        """What each process of the server says; those that cannot be reached say nothing."""
        if self.siblings is None:
            return [await self.answer(question, *args)]
        return await self.siblings.ask(question, *args)

    async def carry_out(self, decision: str, *args: Any) -> None:
        """Do it in this process, for all.

        Raises:
            QuireError: it cannot be done.
        """
        await self.decisions[decision](self, *args)

    async def decide(self, decision: str, *args: Any) -> None:
        """Have it done by the process that decides for all. Raises as `carry_out` does."""
        decide = self.carry_out if self.siblings is None else self.siblings.decide
        await decide(decision, *args)

    async def prepare(self) -> None:
        """Meet errors of the chat template at start-up, not at the first request.

        Raises:
            ConfigError: it is not valid, or runs for ever, or a parser is named that is none.
        """
        choose(
            self.config.tool_call_parser, self.config.reasoning_parser, None
        )  # the names, whatever the model has
        defaults = self.config.default_chat_template_kwargs
        if self.form.has_chat:
            await self._make(self.form)
            self.form.chat_template.check_defaults(defaults)
            logger.info("%s", self.form.answer_format.formats.told())
        elif defaults:
            raise ConfigError("--default-chat-template-kwargs needs a model with a chat template")

    async def share_adapters(self, adapters: Mapping[str, LoRARequest]) -> None:
        """Serve these, in all processes, of which this is the first."""
        self.adapters = adapters
        if self.siblings is not None:
            await self.siblings.share_adapters(adapters)

    async def find_adapter(self, name: str | None) -> None:
        """Have an adapter loaded that is not served yet, if a resolver knows it by the name of a model.

        Raises:
            ValidationError: it cannot be used.
        """
        if name and self.adapter_changes.resolves and name not in self.served_names and may_be_name(name):
            await self.decide("resolve_adapter", name)

    def check_model(self, name: str | None) -> str:
        """The name to answer with; an absent or empty one means the model that is served.

        Raises:
            NotFoundError: the server does not serve `name`.
        """
        if not name:
            return self.model_names[0]
        if name not in self.served_names:
            served = ", ".join(self.served_names)
            raise NotFoundError(
                f"the model {name!r:.100} does not exist; this server has: {served}", param="model"
            )
        return name


def server_of(request: Request) -> ServerState:
    """The state of the app that serves `request`."""
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


def _form_options(config: ServerConfig) -> FormOptions:
    return FormOptions(
        config.chat_template,
        config.chat_template_content_format,
        config.tool_call_parser,
        config.reasoning_parser,
    )
