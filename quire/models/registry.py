"""Which class serves which architecture, and who reads its config.json.

Invariant: importing this module loads no torch; a model's module is imported when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError
from quire.models.both_ways import read_both_ways
from quire.models.built_in import BUILT_IN, ENCODERS, BuiltIn
from quire.models.transformers_backend.reader import transformers_has
from quire.plugins import PluginTable, import_place, instance_of

if TYPE_CHECKING:
    from quire.config import ModelArch
    from quire.models.base import CausalLM
    from quire.models.json_object import JsonObject

    ConfigReader = Callable[[str, JsonObject], ModelArch]


_LLAMA_READER = "quire.models.families.llama:read_llama"


@dataclass(frozen=True)
class ModelEntry:
    """How an architecture is served; class and reader may be "module:Name", imported on first use.

    `pools` says that it was made to have its prompts pooled and generates nothing. A package offers one, under the
    architecture's name, as an entry point of the group `quire.models`, from a module that imports no torch.
    """

    model: str | type[CausalLM]
    config_reader: str | ConfigReader = _LLAMA_READER
    pools: bool = False
    both_ways: bool = False
    """Whether it can be an encoder, too: its layers attend without a cache where `ModelArch.bidirectional` is set."""


MODEL_PLUGINS: PluginTable[ModelEntry] = PluginTable(
    "quire.models", "an architecture", {}, instance_of(ModelEntry)
)


_TRANSFORMERS = ModelEntry(
    "quire.models.transformers_backend.model:TransformersForCausalLM",
    "quire.models.transformers_backend.reader:read_transformers",
)
"""Of every architecture that has no row."""


def is_own_class(place: str) -> bool:
    """Whether a class, as `place_of` gives it, computes with quire's own code alone, and not with another package's."""
    return place.startswith("quire.models.") and place != _TRANSFORMERS.model


def _built_in(row: BuiltIn) -> ModelEntry:
    return ModelEntry(
        f"quire.models.{row.model}", f"quire.models.families.{row.reader}", row.pools, row.both_ways
    )


class Registry:
    """Architecture name -> model class and config reader, both imported on first use."""

    def __init__(self) -> None:
        self._rows = {name: _built_in(row) for name, row in (BUILT_IN | ENCODERS).items()}

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
        self._rows[arch] = ModelEntry(model, config_reader)

    def get_supported_archs(self) -> list[str]:
        """Names of all known architectures, sorted."""
        return sorted({*self._rows, *MODEL_PLUGINS.names()})

    def has_row(self, arch: str) -> bool:
        """Whether somebody registered it."""
        return arch in self._rows or arch in MODEL_PLUGINS.names()

    def has(self, arch: str, model_impl: str = "auto") -> bool:
        """Whether it can be served, by transformers' code or ours."""
        try:
            self._row(arch, model_impl)
        except UnsupportedModelError:
            return False
        return True

    def pools(self, arch: str) -> bool:
        """Whether an architecture that somebody registered was made to have its prompts pooled."""
        return self._row(arch, "quire").pools

    def resolve_model_cls(self, arch: str, place: str = "") -> type[CausalLM]:
        """The class that serves an architecture.

        Args:
            place: `place_of` in the process that prepared the config, where it may have been registered.

        Raises:
            UnsupportedModelError: nobody registered it.
            ModelLoadError: it cannot be imported.
        """
        is_here = arch in self.get_supported_archs() and place in ("", self.place_of(arch))
        model: type[CausalLM] = _imported(self._row(arch).model if is_here or not place else place, arch)
        return model

    def place_of(self, arch: str, model_impl: str = "auto") -> str:
        """Where another process finds the class of an architecture, as "module:Name"; imports nothing.

        Raises:
            UnsupportedModelError: nobody registered it, and transformers is not to be asked or has none of the name.
        """
        model = self._row(arch, model_impl).model
        return model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"

    def resolve_config_reader(self, arch: str, model_impl: str = "auto") -> ConfigReader:
        """The function that turns config.json into a `ModelArch`; raises as `place_of` does."""
        row = self._row(arch, model_impl)
        reader: ConfigReader = _imported(row.config_reader, arch)
        return read_both_ways(reader) if row.both_ways else reader

    def _row(self, arch: str, model_impl: str = "auto") -> ModelEntry:
        """`model_impl` is that of `ModelConfig`."""
        if model_impl != "transformers" and arch in self._rows:
            return self._rows[arch]
        if model_impl != "transformers" and arch in MODEL_PLUGINS.names():
            return MODEL_PLUGINS.resolve(arch)
        if model_impl != "quire" and transformers_has(arch):
            return _TRANSFORMERS
        raise UnsupportedModelError(self._say_unknown(arch, model_impl))

    def _say_unknown(self, arch: str, model_impl: str) -> str:
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
            f"what serves {arch}, {target!r}, cannot be imported by this process: {error}; register it from a module "
            "that every process can import, or as a plug-in"
        ) from error


ModelRegistry = Registry()
