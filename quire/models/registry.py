# SPDX-License-Identifier: Apache-2.0
"""Registry of architectures: model class and config.json reader.

Invariant: importing this module does not import torch; a model's module is imported when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError
from quire.models.built_in import BUILT_IN, ENCODERS, PARTS, BuiltIn
from quire.models.families.fields import with_bidirectional
from quire.models.transformers_backend.reader import transformers_has
from quire.plugins import PluginTable, import_place, instance_of

if TYPE_CHECKING:
    from quire.config import ModelArch
    from quire.models.base import CausalLM
    from quire.models.json_object import JsonObject

    ConfigReader = Callable[[str, JsonObject], ModelArch]


_LLAMA_READER = "quire.models.families.llama:read_llama"


@dataclass(frozen=True)
class ArchitectureEntry:
    """Model class and config reader of an architecture, possibly as "module:Name", imported on first use.

    `pools`: a pooling model, which generates nothing. A package offers an entry under the architecture's name, as an
    entry point of the group `quire.models`, from a module that does not import torch.
    """

    model: str | type[CausalLM]
    config_reader: str | ConfigReader = _LLAMA_READER
    pools: bool = False
    both_ways: bool = False
    """True if the decoder can also be an encoder: with `ModelArch.bidirectional` its layers attend without a cache."""


MODEL_PLUGINS: PluginTable[ArchitectureEntry] = PluginTable(
    "quire.models", "an architecture", {}, instance_of(ArchitectureEntry)
)


_TRANSFORMERS = ArchitectureEntry(
    "quire.models.transformers_backend.model:TransformersForCausalLM",
    "quire.models.transformers_backend.reader:read_transformers",
)
"""Entry of every architecture without a row."""


def is_own_class(place: str) -> bool:
    """Return whether a class, as `place_of` gives it, computes with quire's code alone."""
    return place.startswith("quire.models.") and place != _TRANSFORMERS.model


def _built_in(row: BuiltIn) -> ArchitectureEntry:
    return ArchitectureEntry(
        f"quire.models.{row.model}",
        f"quire.models.families.{row.reader}",
        row.pools,
        row.bidirectional_decoder,
    )


class Registry:
    """Architecture name -> model class and config reader, both imported on first use."""

    def __init__(self) -> None:
        self._rows = {name: _built_in(row) for name, row in (BUILT_IN | ENCODERS | PARTS).items()}

    def register_model(
        self, arch: str, model: str | type[CausalLM], *, config_reader: str | ConfigReader = _LLAMA_READER
    ) -> None:
        """Add or replace an architecture; `model` and `config_reader` may be "module:Name", imported on first use.

        Raises:
            ConfigError: a string is not of the form "module:Name".
        """
        for target in (model, config_reader):
            if isinstance(target, str) and not all(target.partition(":")):
                raise ConfigError(f"model {arch}: {target!r} must have the form 'module:Name'")
        self._rows[arch] = ArchitectureEntry(model, config_reader)

    def get_supported_archs(self) -> list[str]:
        """Return the names of all known architectures, sorted."""
        return sorted({*self._rows, *MODEL_PLUGINS.names()})

    def has_row(self, arch: str) -> bool:
        """Return whether the architecture is registered."""
        return arch in self._rows or arch in MODEL_PLUGINS.names()

    def has(self, arch: str, model_impl: str = "auto") -> bool:
        """Return whether an architecture can be served, by quire's code or transformers'."""
        try:
            self._row(arch, model_impl)
        except UnsupportedModelError:
            return False
        return True

    def pools(self, arch: str) -> bool:
        """Return whether a registered architecture is a pooling model."""
        return self._row(arch, "quire").pools

    def resolve_model_cls(self, arch: str, place: str = "") -> type[CausalLM]:
        """Return the class that serves an architecture.

        Args:
            place: `place_of` in the process that prepared the config, where it may have been registered.

        Raises:
            UnsupportedModelError: the architecture is not registered.
            ModelLoadError: it cannot be imported.
        """
        is_here = arch in self.get_supported_archs() and place in ("", self.place_of(arch))
        model: type[CausalLM] = _imported(self._row(arch).model if is_here or not place else place, arch)
        return model

    def place_of(self, arch: str, model_impl: str = "auto") -> str:
        """Return where another process can import the class of an architecture, as "module:Name"; imports nothing.

        Raises:
            UnsupportedModelError: the architecture is not registered, and transformers is disabled or lacks it.
        """
        model = self._row(arch, model_impl).model
        return model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"

    def resolve_config_reader(self, arch: str, model_impl: str = "auto") -> ConfigReader:
        """Return the function that converts config.json to a `ModelArch`; raises as `place_of` does."""
        row = self._row(arch, model_impl)
        reader: ConfigReader = _imported(row.config_reader, arch)
        return with_bidirectional(reader) if row.both_ways else reader

    def _row(self, arch: str, model_impl: str = "auto") -> ArchitectureEntry:
        """Return the entry of an architecture; `model_impl` as in `ModelConfig`."""
        if model_impl != "transformers" and arch in self._rows:
            return self._rows[arch]
        if model_impl != "transformers" and arch in MODEL_PLUGINS.names():
            return MODEL_PLUGINS.resolve(arch)
        if model_impl != "quire" and transformers_has(arch):
            return _TRANSFORMERS
        raise UnsupportedModelError(self._unknown_message(arch, model_impl))

    def _unknown_message(self, arch: str, model_impl: str) -> str:
        if model_impl == "transformers":
            return f"--model-impl transformers: the installed transformers, if any, has no model {arch!r}"
        known = self.get_supported_archs()
        nearest = ", ".join(get_close_matches(arch, known, n=3, cutoff=0.0))
        also = (
            "" if model_impl == "quire" else ", and the installed transformers, if any, has none of that name"
        )
        return (
            f"architecture {arch!r} is not supported; of the {len(known)} that are (docs/models.md) "
            f"the nearest by name: {nearest}{also}"
        )


def _imported(target: Any, arch: str) -> Any:
    if not isinstance(target, str):
        return target
    try:
        return import_place(target)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(
            f"the class {target!r} of {arch} cannot be imported by this process: {error}; register it from a module "
            "that every process can import, or as a plug-in"
        ) from error


ModelRegistry = Registry()
