# SPDX-License-Identifier: Apache-2.0
"""Interface of the server to adapters that it offers, found in `quire.features.ADAPTER_SERVING`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from quire.adapters import MODULES_FLAG, AdapterRequest
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.features import ADAPTER_SERVING
from quire.plugins import import_place


class AdapterNames(Protocol):
    """The adapters served by all processes of a server."""

    adapters: Mapping[str, AdapterRequest]

    @property
    def model_names(self) -> tuple[str, ...]: ...

    async def form_of(self, adapter: AdapterRequest | None) -> Any:
        """Load the tokenizer and chat template of an adapter, if it has its own."""

    async def share_adapters(self, adapters: Mapping[str, AdapterRequest]) -> None:
        """Serve these adapters in all processes."""


class AdapterServing:
    """Adapters of a server; this class is a server without any."""

    def __init__(self, engine: Any, names: AdapterNames, config: ServerConfig) -> None:
        """Accept the arguments of subclasses.

        Args:
            engine: an `AsyncLLM`.
        """

    @classmethod
    def with_absolute_paths(cls, config: ServerConfig) -> ServerConfig:
        """Return the config with absolute paths of adapters, since other processes have another working directory."""
        return config

    @classmethod
    def check_options(cls, engine: EngineConfig, server: ServerConfig) -> None:
        """Check the names and files of the adapters that are given at the start.

        Raises:
            ConfigError: an entry is malformed, or its files are missing.
        """
        if server.offers_adapters:
            raise ConfigError(f"{MODULES_FLAG}: this installation serves no adapters")

    @classmethod
    def named(
        cls, engine: EngineConfig, server: ServerConfig, taken: Collection[str]
    ) -> Mapping[str, AdapterRequest]:
        """Return the adapters that are given at the start, by name; `taken` are the names of the base model.

        Raises:
            ConfigError: an entry is malformed, or its name is in use.
        """
        return {}

    def may_resolve(self, name: str) -> bool:
        """Return whether an unknown name may be that of an adapter, which `resolve_adapter` looks for."""
        return False

    async def check_all(self) -> None:
        """Load the adapters that the server was started with.

        Raises:
            ConfigError: names each unusable adapter with the reason.
        """
        return None


def adapter_serving() -> type[AdapterServing]:
    """Return the class in the table, or the one without adapters."""
    kinds: list[type[AdapterServing]] = [import_place(place) for place in ADAPTER_SERVING.values()]
    return next(iter(kinds), AdapterServing)
