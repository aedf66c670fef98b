# SPDX-License-Identifier: Apache-2.0
"""Keys, tensors and files in alternative places of transformers: read, refused, or named in the log."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.config import ModelArch
from quire.errors import ModelLoadError, StartupError
from quire.models.hf_config import HARMLESS, read_config, read_hf_config
from quire.models.json_object import JsonObject
from quire.models.weight_files import INDEX_NAME, SINGLE_NAME
from tests.fixtures.folded import folded
from tests.fixtures.multimodal import MULTIMODAL
from tests.fixtures.quick import SOME_MODELS, quick
from tests.fixtures.tiny_encoders import TINY_ENCODERS
from tests.fixtures.tiny_models import TINY_MODELS, oracle_of
from tests.models.harness import load_tiny
from tests.models.test_config_overrides import edit, expected, logits
from tests.models.test_encoders import load_encoder, states_of, texts
from tests.models.test_tied_head import rewrite


def config_of(name: str, directory: Path) -> tuple[Any, dict[str, Any]]:
    """The config of a tiny model in transformers, and what it writes into config.json."""
    config = TINY_MODELS[name]()
    config.save_pretrained(directory)
    values = json.loads((directory / "config.json").read_text())
    return config, values | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}


def read(values: dict[str, Any]) -> ModelArch | None:
    """None: it is refused."""
    try:
        return read_config(JsonObject("config.json", values, refused=[]), "auto")
    except StartupError:
        return None


@folded("name", TINY_MODELS)
def test_key_under_an_alias_is_read_or_refused(name: str, tmp_path: Path) -> None:
    config, values = config_of(name, tmp_path)
    arch = read(values)
    assert arch is not None
    for alias, key in type(config).attribute_map.items():
        if key in values and (name, alias) != ("jetmoe", "head_dim"):  # which shapes of tensors refuse
            moved = {alias if own == key else own: value for own, value in values.items()}
            assert read(moved) in (arch, None), alias


@folded("name", TINY_MODELS)
def test_key_of_transformers_is_read_or_harmless(name: str, tmp_path: Path) -> None:
    config, values = config_of(name, tmp_path)
    asked = JsonObject("config.json", values, refused=[])
    read_config(asked, "auto")
    known = {field.name for field in dataclasses.fields(type(config))} | values.keys()
    assert not {key for key in known - asked.asked if not HARMLESS.fullmatch(key)}


def test_key_that_nothing_reads_is_named_once(
    copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = edit(copy_of("llama"), {"logits_scaling": 2.0, "use_cache": False, "empty_option": []})
    with caplog.at_level(logging.INFO):
        read_hf_config(directory, {"attn_logit_softcapping": 3.0})
    assert [(record.levelname, record.message.rpartition("/")[0]) for record in caplog.records] == [
        ("WARNING", f"--hf-overrides: attn_logit_softcapping: unknown keys for {directory}"),
        ("INFO", f"{directory}"),
    ]
    assert caplog.records[1].message.endswith("config.json: not read: logits_scaling")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        read_hf_config(edit(directory, {"logits_scaling": None}), {})
    assert not caplog.text


@pytest.mark.parametrize("name", quick([*TINY_MODELS, *MULTIMODAL], SOME_MODELS))
def test_form_that_transformers_computes_is_read_or_refused(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Stacked experts, among others, which `save_original_format=False` writes."""
    source = tiny_model(name)
    oracle_of(source).save_pretrained(tmp_path / "other", save_original_format=False)
    shutil.copy(source / "config.json", tmp_path / "other")
    try:
        found = logits(tmp_path / "other")
    except ModelLoadError:
        return
    assert torch.equal(found, logits(source))


@pytest.mark.parametrize("name", ["qwen3moe", "deepseekv3", "olmoe", "qwen3next", "gptneox"])
def test_stacked_experts_and_renamed_head_are_read(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny_model(name)
    oracle_of(source).save_pretrained(tmp_path, save_original_format=False)
    shutil.copy(source / "config.json", tmp_path)
    assert load_file(tmp_path / SINGLE_NAME).keys() != load_file(source / SINGLE_NAME).keys()
    assert torch.equal(logits(tmp_path), logits(source))


@pytest.mark.parametrize("name", [name for name in TINY_ENCODERS if "-" not in name])
def test_norms_called_gamma_and_beta_are_read(
    name: str, tiny_encoder: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(tiny_encoder(name), tmp_path / name))
    batch = texts()
    stored = states_of(load_encoder(directory), batch)

    def rename(tensors: dict[str, Tensor]) -> None:
        for old in [old for old in tensors if "LayerNorm." in old]:
            new = old.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
            tensors[new] = tensors.pop(old)

    rewrite(directory, rename)
    for one, other in zip(states_of(load_encoder(directory), batch), stored, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("prefix", ["model.language_model.model.", "language_model.model.model."])
def test_doubled_prefix_of_the_language_model_is_read(prefix: str, copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("with-eyes-mistral3")
    stored = logits(directory)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("language_model.model.")]:
            tensors[name.replace("language_model.model.", prefix, 1)] = tensors.pop(name)

    assert torch.equal(logits(rewrite(directory, rename)), stored)


FILES = ("other.safetensors", "other.safetensors.index.json")


@pytest.mark.parametrize("name", FILES)
def test_weights_that_the_config_names_are_read(name: str, copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("llama")
    tensors = load_file(directory / SINGLE_NAME)
    changed = {key: tensor * 1.5 for key, tensor in tensors.items()}
    save_file(changed, directory / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(changed, "other.safetensors")}
    (directory / "other.safetensors.index.json").write_text(json.dumps(index))
    edit(directory, {"transformers_weights": name})
    torch.testing.assert_close(logits(directory), expected(directory), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["../x.safetensors", "x.bin", "", "gone.safetensors"])
def test_weights_that_the_config_names_elsewhere_are_refused(
    name: str, copy_of: Callable[[str], Path]
) -> None:
    directory = edit(copy_of("llama"), {"transformers_weights": name})
    with pytest.raises(ModelLoadError, match="transformers_weights"):
        load_tiny(directory)


def test_single_file_is_read_beside_a_stale_index(
    copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of("llama")
    stored = logits(directory)
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert torch.equal(logits(directory), stored)
    assert f"{SINGLE_NAME} is loaded, and {INDEX_NAME} is not read" in caplog.text


def test_adapter_config_in_a_model_directory_is_reported(
    copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of("llama")
    adapter = {"base_model_name_or_path": "some/base", "peft_type": "LORA"}
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
    (directory / SINGLE_NAME).rename(directory / "weights.safetensors")
    save_file({"lora": torch.zeros(1)}, directory / "adapter_model.safetensors")
    load_tiny(directory)
    assert "the adapter is not applied; serve it with --lora-modules" in caplog.text
    (directory / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="it is an adapter, of some/base; give that as the model"):
        load_tiny(directory)
