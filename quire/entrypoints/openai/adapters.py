"""`--lora-modules` and the names of adapters, under which they are models of their own beside the base model."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from quire.config import EngineConfig, ServerConfig
from quire.engine.file_states import adapter_request
from quire.errors import ConfigError, ValidationError
from quire.lora.directory import directory_of
from quire.lora_request import MAX_NAME_CHARS, LoRARequest

NAME = rf"[A-Za-z0-9_:-][A-Za-z0-9_.:-]{{0,{MAX_NAME_CHARS - 1}}}"
"""No path, and nothing that a person cannot see."""
_NAME = re.compile(NAME)


def may_be_name(name: str) -> bool:
    """Whether an adapter can be called so."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, taken: Collection[str]) -> str:
    """A name for a new adapter.

    Raises:
        ValidationError: an adapter cannot be called so, or something that is served is.
    """
    if not may_be_name(name):
        raise ValidationError(
            f"lora_name must be 1 to {MAX_NAME_CHARS} letters, digits and any of _ . : - without a dot in front, "
            f"got {name!r:.80}",
            param="lora_name",
        )
    if name in taken:
        raise ValidationError(f"a model is called {name!r} already", param="lora_name")
    return name


def with_absolute_paths(config: ServerConfig) -> ServerConfig:
    """Return the config with absolute paths of adapters: other processes work in another directory."""
    entries = [module.partition("=") for module in config.lora_modules]
    modules = [f"{name}={directory_of(path).absolute()}" if path else name for name, _, path in entries]
    directory = config.lora_dir and str(Path(config.lora_dir).expanduser().absolute())
    return replace(config, lora_modules=tuple(modules), lora_dir=directory)


def named_adapters(
    modules: Sequence[str], config: EngineConfig, taken: Collection[str]
) -> dict[str, LoRARequest]:
    """The adapters of entries NAME=DIRECTORY, numbered in their order; whether they can be used is told by the core.

    Args:
        taken: names of the base model.

    Raises:
        ConfigError: an entry has not this form, its name is none or is taken, or no adapters are served.
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
            raise ConfigError(f"--lora-modules: two models are called {name!r}")
        adapters[name] = adapter_request(name, number, path)
    return adapters
