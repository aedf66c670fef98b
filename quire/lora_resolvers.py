"""`LoRAResolver`: where the adapter of a name that a server does not know yet is, if anywhere.

Invariant: torch-free; called in the process that serves, and only with names that no path can be made of: no slashes,
no dot in front.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path

from quire.config import EngineConfig
from quire.lora.directory import CONFIG_NAME, TEMPLATES_NAME, TEXT_FILES, WEIGHTS_NAME
from quire.plugins import PluginTable, subclass_of


class LoRAResolver(ABC):
    """Made once for a server."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> str | None:
        """The directory of the adapter that a request has named as its model; None: there is none of that name.

        Asked again whenever an unknown name comes, so a "no" is to be cheap.
        """


class DirectoryResolver(LoRAResolver):
    """The adapters in one directory, each in a directory of its own, which is its name.

    Args:
        root: links out of it are not followed, neither an adapter's nor its files'.
    """

    def __init__(self, config: EngineConfig, root: Path) -> None:
        super().__init__(config)
        self._root = root.resolve()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> str | None:
        return await asyncio.to_thread(self._find, lora_name)

    def _find(self, name: str) -> str | None:
        directory = self._root / name
        files = [directory / file for file in (CONFIG_NAME, WEIGHTS_NAME, *TEXT_FILES)]
        templates = directory.glob(f"{TEMPLATES_NAME}/*")
        places = [place.resolve() for place in (directory, *files, *templates)]
        is_inside = all(place.is_relative_to(self._root) for place in places)
        return str(directory) if is_inside and directory.is_dir() else None


LORA_RESOLVERS: PluginTable[type[LoRAResolver]] = PluginTable(
    "quire.lora_resolvers", "an adapter resolver", {}, subclass_of(LoRAResolver)
)
"""All that are installed are asked, after `--lora-dir`, in the order of their names."""
