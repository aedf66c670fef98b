# SPDX-License-Identifier: Apache-2.0
"""The language model of a checkpoint with more parts: its logits are the whole model's, and the rest is left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ModelLoadError, UnsupportedModelError, ValidationError
from quire.models.hf_config import read_hf_config
from quire.models.multimodal import LANGUAGE_MODELS, WRAPPERS
from quire.models.registry import ModelRegistry
from tests.fixtures.folded import folded
from tests.fixtures.hearing_models import HEARING
from tests.fixtures.multimodal import MULTIMODAL
from tests.models.harness import load_tiny, logits_of
from tests.models.test_parity import assert_close, oracle_logits, prompts

GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""What a published file leaves out is what transformers puts there."""


@pytest.mark.parametrize("name", sorted(MULTIMODAL))
def test_logits_are_those_of_the_whole_model(name: str, tiny_model: Callable[[str], Path]) -> None:
    sequences = prompts((1, 5, 40))
    expected = oracle_logits(tiny_model(name), sequences)
    assert max(logits.abs().max().item() for logits in expected) > 0.5, "logits too small to tell anything"
    assert_close(logits_of(load_tiny(tiny_model(name)), sequences, chunk_sizes=[3, 1, 7]), expected)


def test_every_wrapper_has_a_checkpoint_in_the_tests(tiny_model: Callable[[str], Path]) -> None:
    tested = {architecture_of(tiny_model(name)) for name in MULTIMODAL}
    elsewhere = {
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Phi4MMForCausalLM",  # tests/multimodal/test_phi4.py
        "Phi4MultimodalForCausalLM",
        "WhisperForConditionalGeneration",
        *(row.architecture for row in HEARING.values()),  # tests/multimodal
    }
    elsewhere |= {
        row.architecture for row in WRAPPERS.values() if row.reads_text or row.reads_images
    }  # tests/seq2seq
    assert tested | elsewhere == WRAPPERS.keys()


def architecture_of(directory: Path) -> str:
    return str(json.loads((directory / "config.json").read_text())["architectures"][0])


def test_rows_are_in_the_order_of_the_alphabet() -> None:
    assert list(WRAPPERS) == sorted(WRAPPERS, key=str.lower)


def test_language_models_are_of_architectures_that_are_there() -> None:
    assert all(ModelRegistry.has(known.architecture) for known in LANGUAGE_MODELS.values())


@folded("kind", [kind for kind, known in LANGUAGE_MODELS.items() if known.usual_sizes])
def test_usual_sizes_are_those_of_the_config_class(kind: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[kind]()
    text = {"model_type": kind, "head_dim": 128}
    values = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    ours = read(tmp_path, values)
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size, theirs.num_hidden_layers,
    )  # fmt: skip
    assert (ours.num_heads, ours.num_kv_heads, ours.max_position_embeddings) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.max_position_embeddings,
    )  # fmt: skip


def read(directory: Path, values: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(values))
    return read_hf_config(directory, {})


def test_published_config_is_read_with_values_for_all_parts(tmp_path: Path) -> None:
    arch = read(tmp_path, GEMMA3_4B)
    assert (arch.architecture, arch.dtype, arch.eos_token_ids) == ("Gemma3ForCausalLM", "bfloat16", (1, 106))
    assert (arch.vocab_size, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (262208, 8, 4, 256)
    assert arch.tie_word_embeddings
    assert arch.part_of.architecture == "Gemma3ForConditionalGeneration"


def test_user_overrides_apply_to_the_language_model(tmp_path: Path) -> None:
    read(tmp_path, GEMMA3_4B)
    arch = read_hf_config(tmp_path, {"max_position_embeddings": 4096, "tie_word_embeddings": False})
    assert (arch.max_position_embeddings, arch.tie_word_embeddings) == (4096, False)


def test_keys_beside_each_other_with_three_positions_of_a_token(tmp_path: Path) -> None:
    values = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "use_sliding_window": False,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    arch = read(tmp_path, values)
    assert (arch.architecture, arch.num_layers, arch.num_kv_heads) == ("Qwen2ForCausalLM", 28, 4)
    assert (arch.rope.kind, arch.rope.theta) == ("default", 1e6)


def test_unknown_language_model_is_refused(tmp_path: Path) -> None:
    values = GEMMA3_4B | {"text_config": {"model_type": "mamba"}}
    with pytest.raises(
        UnsupportedModelError,
        match=r"text_config: model_type = \"mamba\" .*one of cohere2, gemma, gemma2, gemma3_text",
    ):
        read(tmp_path, values)


LAYOUTS = {"published": "language_model.model.", "of-late": "model.language_model."}


@pytest.mark.parametrize(
    ("name", "layout"), [("gemma3n", "published"), ("gemma3n", "of-late"), ("gemma4", "of-late")]
)
def test_both_layouts_are_read(
    name: str, layout: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = rewritten(tiny_model(name), tmp_path, LAYOUTS[layout])
    sequences = prompts((5, 17))
    ours = logits_of(load_tiny(directory), sequences, chunk_sizes=[7])
    assert_close(ours, oracle_logits(tiny_model(name), sequences))


def rewritten(source: Path, directory: Path, beginning: str, **more: torch.Tensor) -> Path:
    """A checkpoint of a language model as that of a model which hears and sees, too."""
    text = json.loads((source / "config.json").read_text())
    whole = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    values = {"architectures": [whole], "text_config": text}
    (directory / "config.json").write_text(json.dumps(values))
    tensors = {
        beginning + name.removeprefix("model."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    others = {
        f"model.{part}.x.weight": torch.ones(1) for part in ("audio_tower", "embed_audio", "vision_tower")
    }
    save_file(tensors | others | more, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model.nose.weight", "tensor 'model.nose.weight' has no place"),
        ("language_model.model.norm.weight", "a tensor is there twice"),
    ],
)
def test_tensor_of_an_unknown_part_is_refused(
    name: str, problem: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    more = {name: torch.ones(64)}
    directory = rewritten(tiny_model("gemma3n"), tmp_path, "model.language_model.", **more)
    with pytest.raises(ModelLoadError, match=problem):
        load_tiny(directory)


@pytest.mark.parametrize("place", ["top", "text_config"])
@pytest.mark.parametrize("key", ["image_token_id", "image_token_index", "video_token_id", "audio_token_id"])
def test_prompt_with_placeholder_of_an_image_is_refused(
    key: str, place: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The language model has never read such a token: in its place came what the tower made of an image."""
    shutil.copytree(tiny_model("with-eyes-gemma3"), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    (config if place == "top" else config[place])[key] = 9
    path.write_text(json.dumps(config))
    llm = LLM(str(tmp_path / "model"), skip_tokenizer_init=True, max_model_len=32)
    params = SamplingParams(max_tokens=1, detokenize=False)
    with pytest.raises(ValidationError, match="token 9, in whose place Gemma3ForConditionalGeneration"):
        llm.generate({"prompt_token_ids": [3, 9, 4]}, params)
    assert len(llm.generate({"prompt_token_ids": [3, 8, 4]}, params)) == 1
    llm.shutdown()
