"""The table of architectures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.errors import ConfigError, UnsupportedModelError
from quire.models.base import CausalLM
from quire.models.hf_config import read_llama, read_qwen3
from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ModelRegistry, Registry


@pytest.mark.parametrize("arch", ModelRegistry.get_supported_archs())
def test_every_row_resolves(arch: str) -> None:
    assert issubclass(ModelRegistry.resolve_model_cls(arch), CausalLM)
    assert ModelRegistry.resolve_config_reader(arch).__module__ == "quire.models.hf_config"


def test_register_a_class_or_its_place() -> None:
    registry = Registry()
    registry.register_model("MyModel", LlamaForCausalLM)
    registry.register_model("YourModel", "quire.models.llama:Phi3ForCausalLM", config_reader=read_qwen3)
    assert registry.resolve_model_cls("MyModel") is LlamaForCausalLM
    assert registry.resolve_config_reader("MyModel") is read_llama
    assert registry.resolve_model_cls("YourModel").__name__ == "Phi3ForCausalLM"
    assert registry.resolve_config_reader("YourModel") is read_qwen3
    assert "MyModel" not in ModelRegistry.get_supported_archs()


@pytest.mark.parametrize("target", ["quire.models.llama", ":Llama", "quire.models.llama:"])
def test_a_place_needs_module_and_name(target: str) -> None:
    with pytest.raises(ConfigError, match="must have the form 'module:Name'"):
        Registry().register_model("MyModel", target)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedModelError, match="'Nope' is not supported; the known ones are GPT2LMHeadModel, "
    ):
        ModelRegistry.resolve_model_cls("Nope")


def test_importing_the_registry_loads_no_torch() -> None:
    code = "import sys, quire.models.registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
