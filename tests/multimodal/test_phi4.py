# SPDX-License-Identifier: Apache-2.0
"""Phi-4-multimodal whole: media imply an adapter of the checkpoint, and text alone has the model's bits."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.config import EngineConfig
from quire.config.model import LoRAConfig
from quire.engine.startup import prepare
from quire.errors import ConfigError, ValidationError
from quire.multimodal.processors.base import BESIDE_IMAGES, make_processor
from quire.multimodal.processors.sound import FEATURES
from quire.multimodal.towers.load import load_tower
from tests.fixtures.folded import folded
from tests.fixtures.hearing_models import RATE, sound
from tests.fixtures.seeing_models import IMAGE_TOKEN, make_phi4
from tests.lora.adapters import write_adapter
from tests.models.harness import prepared_config

NUM_TOKENS = 5
SOUND_TOKEN = IMAGE_TOKEN + 1
NEVER = {IMAGE_TOKEN: -100.0, SOUND_TOKEN: -100.0}
PARAMS = SamplingParams(
    max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=1, logit_bias=NEVER
)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 61, 3), dtype=np.uint8))
SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(3)
    for name, shape in {
        "self_attn.qkv_proj": (128, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_up_proj": (192, 64),
        "mlp.down_proj": (64, 96),
    }.items()
}
TEXT = {"prompt_token_ids": [1, *range(8, 31)]}
SHOWN = {"prompt_token_ids": [1, 5, IMAGE_TOKEN, 9, 11], "multi_modal_data": {"image": PICTURE}}
ONE, OTHER = sound(9_100), sound(5_000, 3)
HEARD = {"prompt_token_ids": [1, 5, SOUND_TOKEN, 9, 11], "multi_modal_data": {"audio": (ONE, RATE)}}
TWO = {
    "prompt_token_ids": [1, SOUND_TOKEN, 5, SOUND_TOKEN, 7],
    "multi_modal_data": {"audio": [(OTHER, RATE), (ONE, RATE)]},
}
BOTH = {
    "prompt_token_ids": [1, 5, SOUND_TOKEN, 9, IMAGE_TOKEN, 11],
    "multi_modal_data": {"audio": (ONE, RATE), "image": PICTURE},
}


def write_checkpoint(path: Path) -> Any:
    """Write a checkpoint with its adapter, and one of a user; return transformers' model."""
    model = make_phi4(path)
    for name, rank in (("vision-lora", 20), ("speech-lora", 12), ("own", 5)):
        write_adapter(path / name, SHAPES, rank=rank, seed=rank)
    image = {"size": {"height": 28, "width": 28}, "patch_size": 7}
    (path / "preprocessor_config.json").write_text(json.dumps(image))
    vocab = {f"t{index}": index for index in range(96)}
    named = {"<|endoftext10|>": IMAGE_TOKEN, "<|endoftext11|>": SOUND_TOKEN}
    vocab = {token: index for token, index in vocab.items() if index not in named.values()} | named
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(named))
    backend.save(str(path / "tokenizer.json"))
    return model


def merged(model: Any, directory: Path) -> Any:
    """Return transformers' model with an adapter in its weights."""
    tensors = load_file(directory / "adapter_model.safetensors")
    values = json.loads((directory / "adapter_config.json").read_text())
    found = copy.deepcopy(model)
    for name in SHAPES:
        a, b = (tensors[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
        found.get_submodule(name).weight.data += values["lora_alpha"] / values["r"] * (b @ a)
    return found


def opened(path: Path, **options: Any) -> LLM:
    return LLM(str(path), device="cpu", dtype="float32", max_model_len=256, max_num_seqs=4, **options)


def bits_of(output: Any) -> tuple[list[int], list[float]]:
    tokens = list(output.outputs[0].token_ids)
    rows = output.outputs[0].logprobs
    return tokens, [row[token].logprob for token, row in zip(tokens, rows, strict=True)]


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("phi4"))


@pytest.fixture(name="model", scope="module")
def _model(path: Path) -> Any:
    return write_checkpoint(path)


@pytest.fixture(name="llm", scope="module")
def _llm(path: Path, model: Any) -> Iterator[LLM]:
    assert model is not None
    llm = opened(path)
    llm.generate([SHOWN, HEARD], PARAMS, use_tqdm=False)  # starts the processes that decode, which stay
    yield llm
    llm.shutdown()


def check(model: Any, output: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Check tokens and logprobs against transformers' model."""
    ids = list(output.prompt_token_ids)
    tokens, logprobs = bits_of(output)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids + tokens]), **inputs, use_cache=False).logits
    want = logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
    assert np.allclose(logprobs, want[range(NUM_TOKENS), tokens].numpy(), atol=2e-3)
    want[:, list(NEVER)] -= 100.0
    assert tokens == want.argmax(-1).tolist()


def seen(path: Path) -> dict[str, torch.Tensor]:
    processor = make_processor("Phi4MultimodalForCausalLM", path, {})
    assert processor is not None
    floats = processor.floats(processor.prepare(PICTURE, {}).arrays)
    return {name: torch.from_numpy(array) for name, array in floats.items()}


def heard(samples: Any) -> dict[str, torch.Tensor]:
    """Return transformers' inputs of a sound."""
    found = transformers.Phi4MultimodalFeatureExtractor()([samples], sampling_rate=RATE)
    return {name: found[name] for name in ("audio_input_features", "audio_embed_sizes")}


def test_an_image_takes_the_adapter_and_text_none(llm: LLM, model: Any, path: Path) -> None:
    plain = opened(path, language_model_only=True)
    (want,) = plain.generate([TEXT], PARAMS, use_tqdm=False)
    plain.shutdown()
    text, image, again = llm.generate([TEXT, SHOWN, TEXT], PARAMS, use_tqdm=False)
    assert bits_of(text) == bits_of(again) == bits_of(want)
    check(model, text, {})
    check(merged(model, path / "vision-lora"), image, seen(path))


def test_a_sound_takes_its_adapter_but_beside_an_image(llm: LLM, model: Any, path: Path) -> None:
    alone, both = llm.generate([HEARD, BOTH], PARAMS, use_tqdm=False)
    count = int(heard(ONE)["audio_embed_sizes"])
    assert list(alone.prompt_token_ids or []) == [1, 5, *[SOUND_TOKEN] * count, 9, 11]
    check(merged(model, path / "speech-lora"), alone, heard(ONE))
    check(merged(model, path / "vision-lora"), both, heard(ONE) | seen(path))


def test_bits_of_sounds_depend_on_no_company_or_chunks(llm: LLM, path: Path, model: Any) -> None:
    assert model is not None
    prompts: list[Any] = [TWO, HEARD, TEXT, BOTH, SHOWN]
    want = [bits_of(llm.generate([prompt], PARAMS, use_tqdm=False)[0]) for prompt in prompts]
    assert len(set(map(str, want))) == len(want), "sounds and images change the answer"
    assert [*map(bits_of, llm.generate(prompts, PARAMS, use_tqdm=False))] == want
    other = opened(path, enable_prefix_caching=False, max_num_batched_tokens=16)
    assert [*map(bits_of, other.generate(prompts[::-1], PARAMS, use_tqdm=False))] == want[::-1]
    other.shutdown()


@folded("is_beside", [False, True])
def test_embeddings_of_long_and_short_sounds_are_transformers(
    is_beside: bool, path: Path, model: Any
) -> None:
    tower = load_tower(prepared_config(path))
    ears = model.model.embed_tokens_extend.audio_embed
    up, down = (
        getattr(ears, f"{way}_proj_for_{'vision_' if is_beside else ''}speech") for way in ("up", "down")
    )
    for frames in (1, 7, 9, 200, 4009):  # 4009 become 502 rows, in two chunks
        given = 5.0 + 3.0 * torch.randn(1, frames, 80, generator=torch.Generator().manual_seed(frames))
        arrays = {FEATURES: given.numpy()} | ({BESIDE_IMAGES: np.ones(1)} if is_beside else {})
        with torch.inference_mode():
            want = down(torch.nn.functional.gelu(up(ears.encoder(given, None))))[0]
            state = tower.begin(arrays)
            while not tower.advance(state):
                pass
        got = tower.finish(state).values
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_another_adapter_beside_an_image_is_refused(llm: LLM, model: Any, path: Path) -> None:
    own = LoRARequest("own", 1, str(path / "own"))
    with pytest.raises(ValidationError, match=r"names adapter 'own'.*need the adapter 'vision-lora'"):
        llm.generate([SHOWN], PARAMS, use_tqdm=False, lora_request=own)
    (text,) = llm.generate([TEXT], PARAMS, use_tqdm=False, lora_request=own)
    check(merged(model, path / "own"), text, {})


def resolved(path: Path, **options: Any) -> LoRAConfig:
    return prepare(EngineConfig.from_args(model=str(path), device="cpu", **options), "offline").lora


def test_options_of_implied_adapters_are_resolved(path: Path, model: Any) -> None:
    assert model is not None
    lora = resolved(path)
    assert (lora.enable_lora, lora.max_loras, lora.max_lora_rank) == (True, 2, 20)
    assert [*lora.default_mm_loras] == ["image", "audio"]
    both = {"image": str(path / "vision-lora"), "audio": str(path / "own")}
    lora = resolved(path, default_mm_loras=dict(reversed(both.items())))
    assert [*lora.default_mm_loras.items()] == [*both.items()]
    assert (lora.max_loras, lora.max_lora_rank) == (2, 20)
    assert not resolved(path, language_model_only=True).enable_lora
    for given in ({"smell": str(path / "own")}, {"image": str(path)}, {"image": 3}):
        with pytest.raises(ConfigError, match="--default-mm-loras"):
            resolved(path, default_mm_loras=given)


def original_names(name: str) -> str:
    """The name of a tensor in the authors' form of a checkpoint."""
    for theirs, own in {
        "img_projection_up": "img_projection.0",
        "img_projection_down": "img_projection.2",
        "global_img_feature_extensor": "glb_GN",
        "sub_img_feature_extensor": "sub_GN",
        "up_proj_for_speech": "audio_projection.speech.0",
        "down_proj_for_speech": "audio_projection.speech.2",
        "up_proj_for_vision_speech": "audio_projection.vision.0",
        "down_proj_for_vision_speech": "audio_projection.vision.2",
        "_in.gate_up_proj": "_in.net.0.linear",
        "_in.down_proj": "_in.net.2",
        "_out.gate_up_proj": "_out.net.0.linear",
        "_out.down_proj": "_out.net.2",
    }.items():
        name = name.replace(theirs, own)
    if ".audio_embed." in name:
        name = re.sub(r"self_attn\.(q|k|v)_proj", r"self_attn.linear_\1", name)
        name = name.replace("self_attn.o_proj", "self_attn.linear_out")
    adapted = name.startswith("model.layers.") and "_proj" in name
    return name.replace(".weight", ".base_layer.weight") if adapted else name


def write_original(path: Path, source: Path) -> None:
    """Write a checkpoint in the authors' form, with the adapters' tensors beside those of the model."""
    tensors = {
        original_names(name): tensor for name, tensor in load_file(source / "model.safetensors").items()
    }
    for name, shape in SHAPES.items():
        for kind in ("vision", "speech"):
            tensors[f"{name}.lora_A.{kind}.weight"] = torch.zeros(20, shape[1])
            tensors[f"{name}.lora_B.{kind}.weight"] = torch.zeros(shape[0], 20)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    ears = config.pop("audio_config")
    renamed = {
        "hidden_size": "attention_dim",
        "num_attention_heads": "attention_heads",
        "intermediate_size": "linear_units",
    }
    theirs = {renamed.get(key, key): value for key, value in ears.items() if "nemo_conv" not in key}
    theirs["nemo_conv_settings"] = {"conv_channels": ears["nemo_conv_channels"]}
    theirs["relative_attention_bias_args"] = {"type": "t5", "t5_bias_max_distance": 1000}
    config |= {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    config["audio_processor"] = {"name": "cascades", "config": theirs}
    (path / "config.json").write_text(json.dumps(config))
    for name in ("preprocessor_config.json", "tokenizer.json"):
        (path / name).write_bytes((source / name).read_bytes())
    for name in ("vision-lora", "speech-lora"):
        (path / name).symlink_to(source / name)


def test_the_authors_form_gives_the_same_bits(llm: LLM, path: Path, tmp_path: Path) -> None:
    write_original(tmp_path, path)
    other = opened(tmp_path)
    found = other.generate([TEXT, SHOWN, HEARD, BOTH], PARAMS, use_tqdm=False)
    other.shutdown()
    want = llm.generate([TEXT, SHOWN, HEARD, BOTH], PARAMS, use_tqdm=False)
    assert [*map(bits_of, found)] == [*map(bits_of, want)]
