# SPDX-License-Identifier: Apache-2.0
"""Plug-in interface that locates adapters by name.

Invariant: torch-free; called in the API process, and only with names without slashes and leading dots.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path

from quire.config import EngineConfig
from quire.lora.peft_config import CONFIG_NAME, TEXT_FILES, WEIGHTS_NAME
from quire.models.checkpoint_files import TEMPLATE_FOLDER
from quire.plugins import PluginTable, subclass_of


class LoRAResolver(ABC):
    """Locator of adapters; created once per server."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> str | None:
        """Return the directory of the adapter that a request names as its model; None if there is none.

        Called for every request with an unknown name, so a miss must be cheap.
        """


class DirectoryResolver(LoRAResolver):
    """Resolver for a directory of adapters, each in a subdirectory of its name.

    Args:
        root: symbolic links out of it are rejected, an adapter's and its files'.
    """

    def __init__(self, config: EngineConfig, root: Path) -> None:
        super().__init__(config)
        self._root = root.resolve()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> str | None:
        return await asyncio.to_thread(self._find, lora_name)

    def _find(self, name: str) -> str | None:
        directory = self._root / name
        files = [directory / file for file in (CONFIG_NAME, WEIGHTS_NAME, *TEXT_FILES)]
        templates = directory.glob(f"{TEMPLATE_FOLDER}/*")
        places = [place.resolve() for place in (directory, *files, *templates)]
        is_inside = all(place.is_relative_to(self._root) for place in places)
        return str(directory) if is_inside and directory.is_dir() else None


LORA_RESOLVERS: PluginTable[type[LoRAResolver]] = PluginTable(
    "quire.lora_resolvers", "an adapter resolver", {}, subclass_of(LoRAResolver)
)  # All installed resolvers are tried in order of name, after `--lora-dir`.
