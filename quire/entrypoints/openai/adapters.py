"""`--lora-modules`: adapters that are served under names of their own, beside the base model."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.lora.peft_config import read_peft_config
from quire.lora_request import MAX_NAME_CHARS, LoRARequest

_NAME = re.compile(rf"(?!\.)[\w.:-]{{1,{MAX_NAME_CHARS}}}", re.ASCII)


def named_adapters(
    modules: Sequence[str], config: EngineConfig, taken: Collection[str]
) -> dict[str, LoRARequest]:
    """The adapters of entries NAME=DIRECTORY, numbered in their order.

    Args:
        taken: names of the base model.

    Raises:
        ConfigError: an entry has not this form, its name is none or is taken, or no adapters are served.
        ModelLoadError: a directory has no adapter_config.json that can be read; what else it has is read when a request
            first wants it.
        UnsupportedModelError: its config asks for what quire does not do.
    """
    if modules and not config.lora.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora")
    adapters: dict[str, LoRARequest] = {}
    for number, module in enumerate(modules, 1):
        name, _, path = module.partition("=")
        if not path or not _NAME.fullmatch(name):
            raise ConfigError(
                f"--lora-modules: {module!r} must be NAME=DIRECTORY, and the name letters, digits and any of _ . : -"
            )
        if name in adapters or name in taken:
            raise ConfigError(f"--lora-modules: two models are called {name!r}")
        read_peft_config(Path(path).expanduser())
        adapters[name] = LoRARequest(name, number, path)
    return adapters
