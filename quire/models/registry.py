"""Which class serves which architecture, and who reads its config.json.

Invariant: importing this module loads no torch; a model's module is imported when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from quire.config import ModelArch
    from quire.models.base import CausalLM
    from quire.models.json_object import JsonObject

    ConfigReader = Callable[[str, JsonObject], ModelArch]


@dataclass(frozen=True)
class _Row:
    model: str | type[CausalLM]
    config_reader: str | ConfigReader


def _built_in(model: str, config_reader: str) -> _Row:
    return _Row(f"quire.models.{model}", f"quire.models.hf_config:{config_reader}")


_LLAMA_READER = "quire.models.hf_config:read_llama"


class Registry:
    """Architecture name -> model class and config reader, both imported on first use."""

    def __init__(self) -> None:
        self._rows = {
            "GPT2LMHeadModel": _built_in("gpt2:GPT2LMHeadModel", "read_gpt2"),
            "Gemma2ForCausalLM": _built_in("gemma:GemmaForCausalLM", "read_gemma2"),
            "Gemma3ForCausalLM": _built_in("gemma:GemmaForCausalLM", "read_gemma3"),
            "LlamaForCausalLM": _built_in("llama:LlamaForCausalLM", "read_llama"),
            "MistralForCausalLM": _built_in("llama:LlamaForCausalLM", "read_mistral"),
            "OPTForCausalLM": _built_in("opt:OPTForCausalLM", "read_opt"),
            "Phi3ForCausalLM": _built_in("llama:Phi3ForCausalLM", "read_phi3"),
            "Qwen2ForCausalLM": _built_in("llama:LlamaForCausalLM", "read_qwen2"),
            "Qwen3ForCausalLM": _built_in("llama:LlamaForCausalLM", "read_qwen3"),
        }

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
        self._rows[arch] = _Row(model, config_reader)

    def get_supported_archs(self) -> list[str]:
        """Names of all known architectures, sorted."""
        return sorted(self._rows)

    def resolve_model_cls(self, arch: str) -> type[CausalLM]:
        """The class that serves an architecture.

        Raises:
            UnsupportedModelError: nobody registered it.
        """
        model: type[CausalLM] = _imported(self._row(arch).model)
        return model

    def resolve_config_reader(self, arch: str) -> ConfigReader:
        """The function that turns config.json into a `ModelArch`; raises as `resolve_model_cls` does."""
        reader: ConfigReader = _imported(self._row(arch).config_reader)
        return reader

    def _row(self, arch: str) -> _Row:
        if arch not in self._rows:
            known = ", ".join(self.get_supported_archs())
            raise UnsupportedModelError(f"architecture {arch!r} is not supported; the known ones are {known}")
        return self._rows[arch]


def _imported(target: Any) -> Any:
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


ModelRegistry = Registry()
