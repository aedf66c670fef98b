# SPDX-License-Identifier: Apache-2.0
"""`AdapterChanges`: loading, unloading and resolving of adapters while the server runs; and `--lora-modules`.

Invariant: one process decides for all. A name is served once the core has loaded and checked its adapter, and in every
process before the client gets its answer. A removed name is unknown before its adapter is released.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from quire.adapters import MAX_NAME_CHARS, LoRARequest
from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.openai.adapter_serving import AdapterNames, AdapterServing
from quire.errors import ConfigError, ConflictError, NotFoundError, ValidationError
from quire.lora.peft_config import CONFIG_NAME, adapter_request, directory_of
from quire.lora.resolver import LORA_RESOLVERS, DirectoryResolver, LoRAResolver

# Pattern of adapter names: no path, and only visible characters.
NAME = rf"[A-Za-z0-9_:-][A-Za-z0-9_.:-]{{0,{MAX_NAME_CHARS - 1}}}"
_NAME = re.compile(NAME)


def may_be_name(name: str) -> bool:
    """Return whether an adapter may have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, taken: Collection[str]) -> str:
    """Return the name of a new adapter.

    Raises:
        ValidationError: the name is invalid, or already served.
    """
    if not may_be_name(name):
        raise ValidationError(
            f"lora_name must be 1 to {MAX_NAME_CHARS} letters, digits and any of _ . : - without a dot in front, "
            f"got {name!r:.80}",
            param="lora_name",
        )
    if name in taken:
        raise ValidationError(f"the name {name!r} is already served", param="lora_name")
    return name


def with_absolute_paths(config: ServerConfig) -> ServerConfig:
    """Return the config with absolute paths of adapters, since other processes have another working directory."""
    entries = [module.partition("=") for module in config.lora_modules]
    modules = [f"{name}={directory_of(path).absolute()}" if path else name for name, _, path in entries]
    directory = config.lora_dir and str(Path(config.lora_dir).expanduser().absolute())
    return replace(config, lora_modules=tuple(modules), lora_dir=directory)


def named_adapters(
    modules: Sequence[str], config: EngineConfig, taken: Collection[str]
) -> dict[str, LoRARequest]:
    """Return the adapters of NAME=DIRECTORY entries, numbered in order; the core checks them later.

    Args:
        taken: names of the base model.

    Raises:
        ConfigError: an entry is malformed, its name is invalid or in use, or adapters are not enabled.
    """
    if modules and not config.lora.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora")
    adapters: dict[str, LoRARequest] = {}
    for number, module in enumerate(modules, 1):
        name, _, path = module.partition("=")
        if not path or not may_be_name(name):
            raise ConfigError(
                f"--lora-modules: {module!r} must be NAME=DIRECTORY, and the name letters, digits and any of _ . : -"
            )
        if name in adapters or name in taken:
            raise ConfigError(f"--lora-modules: the name {name!r} is used twice")
        adapters[name] = adapter_request(name, number, path)
    return adapters


class AdapterEngine(Protocol):
    """Part of `AsyncLLM` used here."""

    @property
    def config(self) -> EngineConfig: ...

    async def add_lora(self, lora_request: LoRARequest) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...


class AdapterChanges(AdapterServing):
    """Loads and unloads adapters; resolvers are tried in their order for unknown names."""

    def __init__(self, engine: AdapterEngine, names: AdapterNames, config: ServerConfig) -> None:
        self._engine = engine
        self._names = names
        self._resolvers = make_resolvers(engine.config, config)
        self._numbers = itertools.count(len(names.adapters) + 1)
        self._busy: set[str] = set()
        self._resolving: dict[str, asyncio.Task[None]] = {}

    @classmethod
    def with_absolute_paths(cls, config: ServerConfig) -> ServerConfig:
        return with_absolute_paths(config)

    @classmethod
    def check_options(cls, engine: EngineConfig, server: ServerConfig) -> None:
        for name, adapter in named_adapters(server.lora_modules, engine, ()).items():
            path = Path(adapter.lora_path) / CONFIG_NAME
            if not path.is_file():
                raise ConfigError(f"--lora-modules: adapter {name!r}: there is no file {path}")

    @classmethod
    def named(
        cls, engine: EngineConfig, server: ServerConfig, taken: Collection[str]
    ) -> Mapping[str, LoRARequest]:
        return named_adapters(server.lora_modules, engine, taken)

    def may_resolve(self, name: str) -> bool:
        return bool(self._resolvers) and may_be_name(name)

    async def check_all(self) -> None:
        """Load the adapters that the server was started with.

        Raises:
            ConfigError: names each unusable adapter with the reason.
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
        """Serve the adapter of a directory under this name; `inplace` replaces an existing one.

        Running requests of the replaced adapter finish with it.

        Raises:
            ValidationError: the adapter or the name is invalid; ConflictError: the name is being loaded or unloaded.
        """
        taken = {*self._names.model_names} | (set() if inplace else {*self._names.adapters})
        check_name(name, taken)
        with _Alone(name, self._busy):
            await self._read(name, path)

    async def unload(self, name: str) -> None:
        """Stop serving this name; returns when the last request that uses its adapter has finished.

        Raises:
            NotFoundError: no adapter has this name; ConflictError: it is being loaded or unloaded.
        """
        known = self._names.adapters.get(name)
        if known is None:
            raise NotFoundError(f"no adapter has the name {name!r:.80}", param="lora_name")
        with _Alone(name, self._busy):
            left = {other: request for other, request in self._names.adapters.items() if other != name}
            await self._names.share_adapters(left)
        await self._engine.remove_lora(known.lora_int_id)

    async def resolve(self, name: str) -> None:
        """Serve the adapter that a resolver finds for this name, unless it is served already.

        Raises:
            ValidationError: it is unusable.
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
            done.exception()  # already raised to the waiting caller

    async def _read(self, name: str, path: str) -> None:
        request = await asyncio.to_thread(adapter_request, name, next(self._numbers), path)
        await self._check(request)
        await self._names.share_adapters({**self._names.adapters, name: request})

    async def _check(self, request: LoRARequest) -> None:
        """Load an adapter.

        Raises:
            ValidationError: it is unusable.
        """
        await self._names.form_of(request)
        await self._engine.add_lora(request)


class _Alone:
    """Context manager that allows one change of a name at a time.

    Raises:
        ConflictError: on entry, during another change.
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
    """Return the resolver of `--lora-dir`, then the installed ones.

    Raises:
        ConfigError: the directory does not exist, adapters are not enabled, or a plug-in is invalid.
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
        raise ConfigError(f"--lora-dir: {server.lora_dir!r} is not a directory")
    return [DirectoryResolver(engine, root), *resolvers]
