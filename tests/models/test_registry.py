# SPDX-License-Identifier: Apache-2.0
"""The table of architectures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.errors import ConfigError, UnsupportedModelError
from quire.models.base import CausalLM
from quire.models.decoder import DecoderForCausalLM
from quire.models.families.llama import read_llama
from quire.models.families.qwen import read_qwen3
from quire.models.registry import ModelRegistry, Registry
from tests.fixtures.folded import folded


@folded("arch", ModelRegistry.get_supported_archs())
def test_every_row_resolves(arch: str) -> None:
    assert issubclass(ModelRegistry.resolve_model_cls(arch), CausalLM)
    assert ModelRegistry.resolve_config_reader(arch).__module__.startswith("quire.models.families.")


def test_register_a_class_or_its_place() -> None:
    registry = Registry()
    registry.register_model("MyModel", DecoderForCausalLM)
    registry.register_model("YourModel", "quire.models.decoder:DecoderForCausalLM", config_reader=read_qwen3)
    assert registry.resolve_model_cls("MyModel") is DecoderForCausalLM
    assert registry.resolve_config_reader("MyModel") is read_llama
    assert registry.resolve_model_cls("YourModel").__name__ == "DecoderForCausalLM"
    assert registry.resolve_config_reader("YourModel") is read_qwen3
    assert "MyModel" not in ModelRegistry.get_supported_archs()


@pytest.mark.parametrize("target", ["quire.models.decoder", ":Llama", "quire.models.decoder:"])
def test_a_place_needs_module_and_name(target: str) -> None:
    with pytest.raises(ConfigError, match="must have the form 'module:Name'"):
        Registry().register_model("MyModel", target)


def test_unknown_architecture_names_the_nearest_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'Qwen4ForCausalLM' is not supported; .*: Qwen"):
        ModelRegistry.resolve_model_cls("Qwen4ForCausalLM")


def test_importing_the_registry_loads_no_torch() -> None:
    code = "import sys, quire.models.registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
