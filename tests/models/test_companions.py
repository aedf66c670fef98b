# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose language model and encoder are in other ones: read as if all were in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError, ValidationError
from quire.kv_store.namespace import weights_digest
from quire.models.checkpoint import read_model_config
from quire.models.hf_config import read_hf_config
from quire.multimodal.door.door import make_door
from quire.multimodal.towers.load import load_tower
from quire.quantize.grid import IntegerGrid
from quire.quantize.recipe import Recipe
from quire.quantize.run import quantize_checkpoint
from tests.fixtures.folded import folded
from tests.fixtures.hearing_models import ENCODER, HEARING, RATE, TEXT, random_hearing, sound, write_files
from tests.fixtures.ultravox import Ultravox, UltravoxConfig
from tests.models.harness import load_tiny, logits_of, prepared_config

FAMILY = HEARING["ultravox"]
PROMPTS = [[1, 5, 9, 2], [*range(3, 30)]]
ONE = sound(17_000)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)


def random_ultravox(**options: Any) -> Ultravox:
    """Return a model with random weights; `options` are keys of config.json."""
    text = TEXT | {"model_type": "llama", "head_dim": 16}
    family = replace(FAMILY, config=lambda: UltravoxConfig(ENCODER, text, **options))
    model: Ultravox = random_hearing(family)
    return model


@pytest.fixture(name="joined", scope="module")
def _joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("joined")
    random_ultravox().save_pretrained(path)
    write_files("ultravox", path)
    return path


@pytest.fixture(name="apart", scope="module")
def _apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apart")
    random_ultravox().save_apart(path)
    write_files("ultravox", path)
    return path


def edited(path: Path, **values: Any) -> None:
    """Change keys of a config.json; None removes one."""
    file = path / "config.json"
    merged = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


@pytest.fixture(name="own")
def _own(tmp_path: Path) -> Callable[..., Path]:
    def write(**options: Any) -> Path:
        random_ultravox(**options).save_apart(tmp_path)
        write_files("ultravox", tmp_path)
        return tmp_path

    return write


def opened(path: Path, **options: Any) -> LLM:
    return LLM(str(path), device="cpu", dtype="float32", max_model_len=256, max_num_seqs=4, **options)


@torch.inference_mode()
def embeddings_of(path: Path) -> torch.Tensor:
    """Return the embeddings of a sound, by the processor that a server would have and the tower."""
    config = prepared_config(path)
    door = make_door(config, offline=True)
    assert door is not None
    assert door.processor.sounds is not None
    arrays = door.processor.sounds.prepare(ONE).arrays
    door.close()
    tower = load_tower(config)
    state = tower.begin(arrays)
    while not tower.advance(state):
        pass
    return tower.finish(state).values


def test_parts_elsewhere_have_the_bits_of_one_checkpoint(joined: Path, apart: Path) -> None:
    of_one, of_three = (logits_of(load_tiny(path), PROMPTS, chunk_sizes=[3, 7]) for path in (joined, apart))
    assert all(map(torch.equal, of_one, of_three))
    assert torch.equal(embeddings_of(joined), embeddings_of(apart))


def test_engine_with_companion_parts_matches_one_checkpoint(apart: Path, joined: Path) -> None:
    prompt: Any = {"prompt": "t5 <|audio|> t6", "multi_modal_data": {"audio": (ONE, RATE)}}
    outputs = []
    for path, tokens in ((apart, 16), (joined, 64)):
        llm = opened(path, max_num_batched_tokens=tokens)
        outputs += llm.generate([prompt], GREEDY, use_tqdm=False)
        llm.shutdown()
    found, want = outputs
    assert found.prompt_token_ids == want.prompt_token_ids == [5, *FAMILY.tokens(len(ONE)), 6]
    assert found.outputs[0].token_ids == want.outputs[0].token_ids
    assert str(found.outputs[0].logprobs) == str(want.outputs[0].logprobs)


def test_marker_beyond_the_model_vocabulary_is_a_sound(tmp_path: Path) -> None:
    random_ultravox(audio_token_index=96).save_pretrained(tmp_path)
    write_files("ultravox", tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["<|audio|>"] = vocabulary["added_tokens"][-1]["id"] = 96
    assert vocabulary["added_tokens"][-1]["content"] == "<|audio|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    llm = opened(tmp_path)
    data = {"multi_modal_data": {"audio": (ONE, RATE)}}
    prompts: list[Any] = [{"prompt": "t5 <|audio|> t6"} | data, {"prompt_token_ids": [5, 96, 6]} | data]
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len({str(output.outputs[0].logprobs) for output in found}) == 1
    assert found[0].prompt_token_ids == [5, *[2] * FAMILY.count(len(ONE)), 6]
    with pytest.raises(ValidationError):
        llm.generate({"prompt_token_ids": [5, 96, 6]}, GREEDY, use_tqdm=False)
    llm.shutdown()


@folded("options", [{"projector_ln_mid": False}, {"projector_act": "gelu"}, {"num_projector_layers": 2}])
def test_embeddings_are_those_of_every_projection(
    options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("projection")
    model = random_ultravox(**options)
    model.save_pretrained(path)
    write_files("ultravox", path)
    with torch.inference_mode():
        want = model.embeddings(FAMILY.inputs([ONE])["input_features"][0])
    torch.testing.assert_close(embeddings_of(path), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_a_missing_companion_is_named_with_a_remedy(own: Callable[..., Path], tmp_path: Path) -> None:
    path = own()
    edited(path, text_model_id=str(tmp_path / "nowhere"))
    with pytest.raises(
        ModelLoadError, match=r"text_model_id names another .*nowhere.*--hf-overrides '{\"text"
    ):
        read_model_config(path, {})
    arch = read_model_config(path, {"text_model_id": str(tmp_path / "language")})
    assert arch.part_of is not None
    assert (arch.part_of.language_dir, arch.num_layers) == (str(tmp_path / "language"), 3)
    (tmp_path / "language" / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "language" / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="GGUF cannot be a part"):
        read_model_config(path, {"text_model_id": str(tmp_path / "language")})


def test_a_part_that_is_stored_is_read_from_its_checkpoint(own: Callable[..., Path], tmp_path: Path) -> None:
    path = own()
    language = load_file(path / "language" / "model.safetensors")
    own_parts = {f"language_model.{name}": tensor for name, tensor in language.items()}
    save_file(load_file(path / "model.safetensors") | own_parts, path / "model.safetensors")
    want = logits_of(load_tiny(path), PROMPTS, chunk_sizes=[5])
    edited(path, text_config=TEXT | {"model_type": "llama", "head_dim": 16}, text_model_id="no/where")
    part_of = read_hf_config(path, {}).part_of
    assert part_of is not None
    assert part_of.companion_dirs == [str(tmp_path / "encoder")]
    assert all(map(torch.equal, want, logits_of(load_tiny(path), PROMPTS, chunk_sizes=[5])))


def test_quantizing_names_the_checkpoint_to_quantize(apart: Path, tmp_path: Path) -> None:
    config = EngineConfig.from_args(model=str(apart), device="cpu")
    with pytest.raises(ConfigError, match=f"is in {apart}/language: quantize that checkpoint"):
        quantize_checkpoint(config, Recipe("rtn", IntegerGrid(8, 32)), tmp_path / "q")


def test_overrides_reach_a_language_model_elsewhere(apart: Path) -> None:
    arch = read_hf_config(apart, {"text_config": {"rope_theta": 77.0}, "max_position_embeddings": 100})
    assert (arch.rope.theta, arch.max_position_embeddings) == (77.0, 100)


def test_files_of_parts_are_among_those_of_the_model(own: Callable[..., Path]) -> None:
    config = prepared_config(own())
    before = weights_digest(config)
    file = Path(config.model_dir) / "language" / "model.safetensors"
    changed = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(changed, file)
    assert weights_digest(config) != before


def test_old_default_placeholder_is_text(own: Callable[..., Path]) -> None:
    path = own(audio_token_index=32000)
    part_of = read_hf_config(path, {}).part_of
    assert part_of is not None
    assert part_of.placeholder_ids == {32000}
    part_of = read_hf_config(path, {"text_config": {"vocab_size": 128256}}).part_of
    assert part_of is not None
    assert not part_of.placeholder_ids


@folded(
    ("options", "message"),
    [
        ({"audio_latency_block_size": 100}, "audio_latency_block_size"),
        ({"projector_act": "swish"}, "projector_act"),
        ({"audio_config": ENCODER | {"model_type": "wav2vec2"}}, "model_type"),
        ({"audio_config": ENCODER | {"scale_embedding": True}}, "scale_embedding"),
    ],
)
def test_options_that_are_not_computed_are_refused(
    options: dict[str, Any], message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("refused")
    model = random_ultravox()
    model.config.values |= options
    model.save_pretrained(path)
    with pytest.raises(UnsupportedModelError, match=message):
        load_tower(prepared_config(path))


def test_language_model_inside_a_multimodal_one_is_found(own: Callable[..., Path]) -> None:
    path = own()
    file = path / "language" / "config.json"
    text = json.loads(file.read_text())
    whole = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text, "dtype": "float32"}
    file.write_text(json.dumps(whole))
    weights = path / "language" / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}
    save_file(tensors | {"vision_tower.a": torch.ones(1), "multi_modal_projector.b": torch.ones(1)}, weights)
    logits = logits_of(load_tiny(path), PROMPTS, chunk_sizes=[5])
    file.write_text(json.dumps(text))
    save_file({name.removeprefix("language_model."): tensors[name] for name in tensors}, weights)
    assert all(map(torch.equal, logits, logits_of(load_tiny(path), PROMPTS, chunk_sizes=[5])))
