"""`AdapterChanges`: how a server comes by adapters, and lets go of them, while it serves.

Invariant: one process decides for all of a server's. A name is served from when the core has read and checked its
adapter, in every process before whoever asked for it hears so; and a name that is gone is unknown before its adapter is
let go of.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from quire.config import EngineConfig, ServerConfig
from quire.engine.file_states import adapter_request
from quire.entrypoints.openai.adapters import check_name
from quire.errors import ConfigError, ConflictError, NotFoundError, ValidationError
from quire.lora_request import LoRARequest
from quire.lora_resolvers import LORA_RESOLVERS, DirectoryResolver, LoRAResolver


class Engine(Protocol):
    """What of `AsyncLLM` is used."""

    async def add_lora(self, lora_request: LoRARequest) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...


class Names(Protocol):
    """The adapters of a server, wherever it has processes."""

    adapters: Mapping[str, LoRARequest]

    @property
    def model_names(self) -> tuple[str, ...]: ...

    async def form_of(self, adapter: LoRARequest | None) -> Any:
        """Read the tokenizer and the chat template of an adapter, if they are its own."""

    async def share_adapters(self, adapters: Mapping[str, LoRARequest]) -> None:
        """Have all processes serve these."""


class AdapterChanges:
    """Loads adapters and unloads them.

    Args:
        resolvers: are asked in this order for names that nobody knows.
    """

    def __init__(self, engine: Engine, names: Names, resolvers: list[LoRAResolver]) -> None:
        self._engine = engine
        self._names = names
        self._resolvers = resolvers
        self._numbers = itertools.count(len(names.adapters) + 1)
        self._busy: set[str] = set()
        self._resolving: dict[str, asyncio.Task[None]] = {}

    @property
    def resolves(self) -> bool:
        """Whether a name that is unknown now may be known when it is asked for."""
        return bool(self._resolvers)

    async def check_all(self) -> None:
        """Read the adapters that the server was started with.

        Raises:
            ConfigError: names each that cannot be used, and says why.
        """
        problems = []
        for request in self._names.adapters.values():
            try:
                await self._check(request)
            except ValidationError as error:
                problems.append(f"{error} ({request.lora_path})")
        if problems:
            raise ConfigError(f"--lora-modules: {'; '.join(problems)}")

    async def load(self, name: str, path: str, *, inplace: bool) -> None:
        """Serve the adapter of a directory under this name; with `inplace` also in the place of one that has it.

        Requests that have the one before end with it.

        Raises:
            ValidationError: it cannot be used, or the name; ConflictError: the name is being loaded or unloaded.
        """
        taken = {*self._names.model_names} | (set() if inplace else {*self._names.adapters})
        check_name(name, taken)
        with _Alone(name, self._busy):
            await self._read(name, path)

    async def unload(self, name: str) -> None:
        """Serve this name no more; done when the last request that has its adapter has ended.

        Raises:
            NotFoundError: no adapter has this name; ConflictError: it is being loaded or unloaded.
        """
        known = self._names.adapters.get(name)
        if known is None:
            raise NotFoundError(f"no adapter is called {name!r:.80}", param="lora_name")
        with _Alone(name, self._busy):
            left = {other: request for other, request in self._names.adapters.items() if other != name}
            await self._names.share_adapters(left)
        await self._engine.remove_lora(known.lora_int_id)

    async def resolve(self, name: str) -> None:
        """Serve an adapter that a resolver knows by this name, if one does and it is not served yet.

        Raises:
            ValidationError: it cannot be used.
        """
        if name not in self._resolving:
            self._resolving[name] = task = asyncio.create_task(self._resolve(name))
            task.add_done_callback(lambda done: self._forget(name, done))
        await asyncio.shield(self._resolving[name])

    async def _resolve(self, name: str) -> None:
        base = self._names.model_names[0]
        for resolver in self._resolvers:
            if name in self._names.adapters:
                return
            path = await resolver.resolve_lora(base, name)
            if path is not None and name not in self._names.adapters and name not in self._busy:
                await self.load(name, path, inplace=False)

    def _forget(self, name: str, done: asyncio.Task[None]) -> None:
        del self._resolving[name]
        if not done.cancelled():
            done.exception()  # who waited for it has it

    async def _read(self, name: str, path: str) -> None:
        request = await asyncio.to_thread(adapter_request, name, next(self._numbers), path)
        await self._check(request)
        await self._names.share_adapters({**self._names.adapters, name: request})

    async def _check(self, request: LoRARequest) -> None:
        """Raises ValidationError: the adapter cannot be used."""
        await self._names.form_of(request)
        await self._engine.add_lora(request)


class _Alone:
    """One change of a name at a time.

    Raises:
        ConflictError: on entry, while there is another.
    """

    def __init__(self, name: str, busy: set[str]) -> None:
        self._name = name
        self._busy = busy

    def __enter__(self) -> None:
        if self._name in self._busy:
            raise ConflictError(f"the adapter {self._name!r} is being loaded or unloaded", param="lora_name")
        self._busy.add(self._name)

    def __exit__(self, *_: object) -> None:
        self._busy.remove(self._name)


def make_resolvers(engine: EngineConfig, server: ServerConfig) -> list[LoRAResolver]:
    """That of `--lora-dir`, then those that are installed.

    Raises:
        ConfigError: the directory is none, no adapters are served, or a plug-in does not fit.
    """
    if not engine.lora.enable_lora:
        if server.lora_dir:
            raise ConfigError("--lora-dir needs --enable-lora")
        return []
    resolvers = [make(engine) for make in LORA_RESOLVERS.resolve_all()]
    if server.lora_dir is None:
        return resolvers
    root = Path(server.lora_dir).expanduser()
    if not root.is_dir():
        raise ConfigError(f"--lora-dir: {server.lora_dir!r} is no directory")
    return [DirectoryResolver(engine, root), *resolvers]
