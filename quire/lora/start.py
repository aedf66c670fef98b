# SPDX-License-Identifier: Apache-2.0
"""Start of adapters: their limits are checked, and those that media imply are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.start_feature import AutomaticValue, Resolution, StartFeature
from quire.errors import ConfigError
from quire.lora.peft_config import CONFIG_NAME, read_peft_config

KINDS = ("image", "video", "audio")
"""Kinds of media; of several in a prompt the first one decides about its adapter."""


class LoRAStart(StartFeature):
    """Finds the adapters of prompts with media; refuses contradictory limits and rounding that ranks would change."""

    def resolve(self, config: EngineConfig, id_of: Callable[[str], int | None]) -> Resolution:
        directories = _given(config) or _of_checkpoint(config)
        return Resolution(choices=[*_choices(config, directories)] if directories else [])

    def check(self, config: EngineConfig) -> None:
        adapters = config.lora
        adapters.check()
        if config.parallel.tp_invariant and adapters.enable_lora and adapters.lora_dtype == "int8":
            raise ConfigError(
                "--tp-invariant requires another --lora-dtype than int8: each rank would quantize its adapter outputs "
                "by its own maximum"
            )


def _given(config: EngineConfig) -> dict[str, Path]:
    """Return the operator's adapters.

    Raises:
        ConfigError: a kind or a directory does not exist.
    """
    given = config.lora.default_mm_loras
    for kind, path in given.items():
        if kind not in KINDS or not isinstance(path, str):
            raise ConfigError(
                f"--default-mm-loras has {kind!r}: {path!r}; it takes a directory for each of {', '.join(KINDS)}"
            )
        if not (Path(path).expanduser() / CONFIG_NAME).is_file():
            raise ConfigError(f"--default-mm-loras: {path} has no {CONFIG_NAME}")
    return {kind: Path(given[kind]).expanduser().absolute() for kind in KINDS if kind in given}


def _of_checkpoint(config: EngineConfig) -> dict[str, Path]:
    """Return the adapters in the directory of a model."""
    part_of = config.arch.part_of
    if part_of is None or config.multimodal.language_model_only:
        return {}
    found = {kind: Path(config.model_dir).absolute() / name for kind, name in part_of.adapters.items()}
    return {kind: path for kind, path in found.items() if (path / CONFIG_NAME).is_file()}


def _choices(config: EngineConfig, directories: dict[str, Path]) -> Iterator[AutomaticValue]:
    lora, adapters = config.lora, [read_peft_config(path) for path in set(directories.values())]
    rank = max(rank for adapter in adapters for rank in (adapter.rank, *adapter.ranks.values()))
    kinds = " and ".join(directories)
    yield AutomaticValue(
        "default_mm_loras", {kind: str(path) for kind, path in directories.items()}, f"of {kinds}"
    )
    if not lora.enable_lora:
        yield AutomaticValue("enable_lora", True, f"prompts with {kinds} have adapters")
        if lora.max_loras < len(adapters):
            yield AutomaticValue("max_loras", len(adapters), "one for each of them")
    if lora.max_lora_rank < rank:
        yield AutomaticValue("max_lora_rank", rank, "the largest rank of these adapters")
