# SPDX-License-Identifier: Apache-2.0
"""Files with image encoders: which one belongs to a model, and what is refused in words."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from safetensors.torch import load_file

from quire.config.arch import ModelArch
from quire.config.multimodal import MultimodalConfig
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError
from quire.models.checkpoint import read_model_config, resolve_model_dir
from quire.models.gguf.projector import KINDS, projector_of, read_projector, with_projector
from tests.fixtures.gguf_models import finish, write_gguf
from tests.fixtures.mmproj_files import SEEING_CASES, write_both, write_projector


@pytest.fixture(name="written", scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_both("llava", tmp_path_factory.mktemp("llava"))


def joined(path: Path, **options: Any) -> ModelArch:
    return with_projector(read_model_config(path, {}), path, MultimodalConfig(**options))


def test_the_encoder_beside_a_model_is_found(written: tuple[Path, Path]) -> None:
    _, path = written
    assert resolve_model_dir(str(path.parent), None, None) == path
    part_of = joined(path).part_of
    assert part_of is not None
    assert part_of.architecture == "LlavaForConditionalGeneration"
    assert part_of.placeholder_ids == {90}
    assert json.loads(part_of.config)["vision_feature_layer"] == -1
    assert joined(path, language_model_only=True).part_of is None


def test_one_of_several_encoders_is_chosen_by_its_dtype(tmp_path: Path) -> None:
    for name in ("mmproj-bf16.gguf", "mmproj-f16.gguf", "mmproj-q8_0.gguf"):
        (tmp_path / name).touch()
    path = tmp_path / "model.gguf"
    assert projector_of(path, MultimodalConfig()) == tmp_path / "mmproj-f16.gguf"
    (tmp_path / "other-mmproj-F16.gguf").touch()
    assert projector_of(path, MultimodalConfig()) is None
    assert projector_of(path, MultimodalConfig(mmproj="/x.gguf")) == Path("/x.gguf")
    with pytest.raises(ConfigError, match="belongs to a model in GGUF"):
        projector_of(tmp_path, MultimodalConfig(mmproj="/x.gguf"))


def test_an_encoder_of_another_model_costs_images_alone(
    written: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    projector = written[1].with_name("mmproj-model-f16.gguf")
    path, _ = write_gguf("llama", tmp_path, hidden_size=128)
    shutil.copy(projector, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert joined(path).part_of is None
    assert "served for text only" in caplog.text
    assert "they are of different models" in caplog.text
    with pytest.raises(ModelLoadError, match=r"size 64, and those of model\.gguf have 128"):
        joined(path, mmproj=str(projector))
    with pytest.raises(ModelLoadError, match="--mmproj takes a file of 'clip'"):
        joined(path, mmproj=str(path))


def test_a_vocabulary_without_the_token_lends_its_unknown_one(
    written: tuple[Path, Path], tmp_path: Path
) -> None:
    path, _ = write_gguf("llama", tmp_path, gguf.GGMLQuantizationType.F32)
    shutil.copy(written[1].with_name("mmproj-model-f16.gguf"), tmp_path)
    assert joined(path).part_of is None  # it has no vocabulary at all
    writer = gguf.GGUFWriter(tmp_path / "with.gguf", "llama")
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_token_list(["a", "<unk>", "b"])
    writer.add_unk_token_id(1)
    finish(writer)
    part_of = joined(tmp_path / "with.gguf").part_of
    assert part_of is not None
    assert part_of.placeholder_ids == {1}
    assert json.loads(part_of.processor_files)["processor_config.json"] == {"image_token": "<unk>"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [({"attention.window": 3}, "key attention.window"), ({"n_wa_pattern": 2}, "n_wa_pattern")],
)
def test_a_key_that_nothing_reads_is_refused(
    written: tuple[Path, Path], tmp_path: Path, keys: dict[str, int], words: str
) -> None:
    tensors = {key: each.numpy() for key, each in load_file(written[0] / "model.safetensors").items()}
    seeing = {key: each for key, each in tensors.items() if key.startswith(("vision_", "multi_"))}
    write_projector(tmp_path / "x.gguf", SEEING_CASES["llava"], seeing, **keys)
    with pytest.raises(UnsupportedModelError, match=words):
        read_projector(tmp_path / "x.gguf")
    more = seeing | {"vision_tower.extra.weight": seeing["multi_modal_projector.linear_1.weight"]}
    write_projector(tmp_path / "y.gguf", SEEING_CASES["llava"], more)
    with pytest.raises(UnsupportedModelError, match=r"tensor v\.extra: quire does not support"):
        read_projector(tmp_path / "y.gguf")


def test_an_unknown_kind_is_refused_with_those_known(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "clip")
    writer.add_clip_projector_type("pixtral")
    for add in (
        writer.add_vision_embedding_length,
        writer.add_vision_block_count,
        writer.add_vision_patch_size,
    ):
        add(4)
    writer.add_vision_head_count(2)
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=f"'pixtral'; quire computes {', '.join(KINDS)}"):
        read_projector(tmp_path / "x.gguf")
