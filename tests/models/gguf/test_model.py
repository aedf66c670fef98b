# SPDX-License-Identifier: Apache-2.0
"""Tests of GGUF models: which files are accepted or refused, and their way through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.config.encoding import READ
from quire.engine.startup import prepare
from quire.errors import ConfigError, ModelLoadError, StartupError, UnsupportedModelError
from quire.layers.gated_delta_net import GatedDeltaNet
from quire.layers.shard import Shard
from quire.models.checkpoint import read_model_config, resolve_model_dir
from quire.models.gguf.architectures import ARCHITECTURES
from quire.models.gguf.model import GgufModel, forget_files, opened_file
from quire.models.json_object import JsonObject
from tests.fixtures.folded import folded
from tests.fixtures.gguf_models import finish, write_demo, write_gguf
from tests.fixtures.tiny_models import oracle_of
from tests.models.harness import load_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=40)
MEMORY = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 * 2**20}
QUESTIONS = ("What is the capital of France?", "Count from 3 to 9.", "hello")


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_the_model_in_the_box_answers_as_transformers_does(kind: Kind, tmp_path: Path) -> None:
    path, oracle = write_demo(tmp_path, kind)
    exact = {} if kind == Kind.BF16 else {"quantization_config": {"mode": "precise"}}
    llm = LLM(str(path), dtype="float32", **exact, **MEMORY)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    model = oracle_of(oracle)
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        ids = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=[0, 2])
        assert list(output.outputs[0].token_ids) == ids[0, prompt.shape[1] :].tolist()
    own = LLM(**MEMORY).chat(chats, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [output.prompt for output in own]
    assert [output.prompt_token_ids for output in outputs] == [output.prompt_token_ids for output in own]


def test_a_split_model_is_the_same_model(tmp_path: Path) -> None:
    whole, _ = write_gguf("mixtral", tmp_path)
    (tmp_path / "parts").mkdir()
    first, _ = write_gguf("mixtral", tmp_path / "parts", max_tensors=7)
    assert first.name == "model-00001-of-00004.gguf"
    models = [load_tiny(path).state_dict() for path in (whole, first)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    (tmp_path / "parts" / "oracle").rename(tmp_path / "oracle2")
    assert resolve_model_dir(str(tmp_path / "parts"), None, None) == first
    with pytest.raises(ModelLoadError, match="is part 2 of 4; name the first one"):
        resolve_model_dir(str(first.with_name("model-00002-of-00004.gguf")), None, None)
    first.with_name("model-00003-of-00004.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00003-of-00004\.gguf, another part of it, is missing"):
        resolve_model_dir(str(first), None, None)


def test_a_directory_with_one_model_is_that_model(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"has 2 GGUF models: name one of a\.gguf, b\.gguf"):
        resolve_model_dir(str(tmp_path), None, None)
    (tmp_path / "a.gguf").unlink()
    assert resolve_model_dir(str(tmp_path), None, None) == tmp_path / "b.gguf"
    (tmp_path / "config.json").touch()
    assert resolve_model_dir(str(tmp_path), None, None) == tmp_path


def test_link_to_a_model_is_followed_to_its_other_parts(tmp_path: Path) -> None:
    """As the cache of the Hugging Face hub has it, where files bear the names of their contents."""
    (tmp_path / "blob").touch()
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
    assert resolve_model_dir(str(tmp_path / "model.gguf"), None, None) == tmp_path / "model.gguf"
    assert resolve_model_dir(str(tmp_path), None, None) == tmp_path / "model.gguf"


def test_packed_weights_are_kept_and_made_again_for_another_file(tmp_path: Path) -> None:
    path, _ = write_gguf("qwen2", tmp_path)
    args: dict[str, Any] = {"packed_weights_cache": str(tmp_path / "cache"), "quantization": "int8"}
    first, second = (load_tiny(path, **args) for _ in range(2))
    assert len(list((tmp_path / "cache").iterdir())) == 1
    ids = torch.arange(4)
    assert torch.equal(first.model.embed_tokens(ids), second.model.embed_tokens(ids))
    write_gguf("qwen2", tmp_path, Kind.Q4_0)
    load_tiny(path, **args)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_gguf_metadata_reaches_the_config(tmp_path: Path) -> None:
    path, _ = write_gguf("gemma3", tmp_path)
    arch = read_model_config(path, {})
    assert arch.model_type == "gemma3"
    assert arch.layer_types == ("sliding_attention", "full_attention")
    assert arch.sliding_window == 8
    assert arch.rope is not None
    assert (arch.rope.kind, arch.rope.factor, arch.rope.theta) == ("linear", 4.0, 1e6)
    assert (arch.eos_token_ids, arch.bos_token_id) == ((2,), 1)
    assert read_model_config(path, {"max_position_embeddings": 99}).max_position_embeddings == 99
    config = prepare(EngineConfig.from_args(model=str(path), skip_tokenizer_init=True), "offline")
    assert (config.model.dtype, config.model_dir) == ("float16", str(path))


def bare(path: Path, architecture: str = "llama", **keys: Any) -> Path:
    """A file without weights but for an embedding table of 8 rows."""
    writer = GGUFWriter(path, architecture)
    sizes = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 32, "context_length": 64}
    sizes |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in (sizes | keys).items():
        if value is not None:
            name = key if key.startswith("tokenizer") else f"{architecture}.{key}"
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    finish(writer)
    return path


@pytest.mark.item(26)
@folded(
    ("keys", "error", "words"),
    [
        (
            {"architecture": "clip"},
            UnsupportedModelError,
            "general.architecture is 'clip'.* known are llama, qwen2",
        ),
        ({"embedding_length": None}, ModelLoadError, "'embedding_length' is missing"),
        ({"embedding_length": "x"}, ModelLoadError, "embedding_length must be an integer"),
        ({"block_count": 10**6}, ModelLoadError, "num_hidden_layers must be an integer in"),
        ({"attention.clamp_kqv": 3.0}, UnsupportedModelError, "attention.clamp_kqv: quire does not support"),
        ({"attention.value_length": 8}, UnsupportedModelError, "attention.value_length = 8 is not supported"),
        ({"rope.scaling.type": "ntk"}, UnsupportedModelError, 'rope.scaling.type = "ntk" is not supported'),
        (
            {"architecture": "granitehybrid", "attention.head_count_kv": [1], "rope.scaling.finetuned": True},
            UnsupportedModelError,
            "rope.scaling.finetuned = true is not supported; it must be false, as in Granite 4",
        ),
        (
            {"architecture": "falcon-h1", "ssm.time_step_rank": 4, "ssm.inner_size": 30},
            ModelLoadError,
            r"ssm.inner_size must be a multiple of ssm.time_step_rank, the number of heads \(4\), got 30",
        ),
        (
            {"architecture": "deepseek2"},
            UnsupportedModelError,
            r"attention.key_length_mla = null is not supported; .*separate key and value projections \(attn_k_b\)",
        ),
        (
            {
                "architecture": "jamba",
                "attention.head_count_kv": [1, 1, 0],
                "ssm.inner_size": 64,
                "expert_count": 0,
            },
            UnsupportedModelError,
            r"of layers that come in turn \(attn_layer: \[0, 1\]\)",
        ),
        (
            {"architecture": "dots1", "expert_gating_func": 1},
            UnsupportedModelError,
            "expert_gating_func = 1 is not supported; it must be absent or 2",
        ),
        (
            {
                "architecture": "olmo2",
                "attention.sliding_window": 8,
                "rope.freq_base": 5e5,
                "rope.freq_base_swa": 1e4,
            },
            UnsupportedModelError,
            "rope.freq_base_swa = 10000.0 is not supported; it must be absent or 500000.0",
        ),
        ({"attention.key_length": "x"}, ModelLoadError, "attention.key_length must be an integer"),
        ({"feed_forward_length": [32, 64]}, UnsupportedModelError, "the same in all layers"),
        ({"tokenizer.ggml.tokens": ["a"] * 9}, ModelLoadError, "has 9 tokens, and token_embd.weight 8 rows"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_metadata_that_is_refused(
    keys: dict[str, Any], error: type[StartupError], words: str, tmp_path: Path
) -> None:
    path = bare(tmp_path / "x.gguf", **keys)
    with pytest.raises(error, match=rf"x\.gguf.*{words}"):
        read_model_config(path, {})


OFF: dict[str, dict[str, Any]] = {
    "pooling none": {"pooling_type": 0},
    "causal": {"attention.causal": True},
    "factor 0": {"rope.scaling.factor": 0.0, "rope.scaling.original_context_length": 0},
    "factor beside type none": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    "old factor 1": {"rope.scale_linear": 1.0},
    "old factor 0": {"rope.scale_linear": 0.0},
    "window 0": {"attention.sliding_window": 0},
    "logit scale 0": {"logit_scale": 0.0},
    "no experts": {"expert_count": 0, "expert_used_count": 0, "expert_group_count": 1},
    "no caps": {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "attention.clamp_kqv": 0.0},
    "no drafts": {"nextn_predict_layers": 0},
}


@folded("architecture", ["llama", "qwen3", "gemma"])
@folded("name", OFF)
def test_gguf_key_that_switches_off_changes_nothing(name: str, architecture: str, tmp_path: Path) -> None:
    plain = read_model_config(bare(tmp_path / "x.gguf", architecture), {})
    assert read_model_config(bare(tmp_path / "x.gguf", architecture, **OFF[name]), {}) == plain


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("gemma3", {"attention.sliding_window": 0}),
        ("olmo2", {"attention.sliding_window": 0}),
        ("phi3", {"attention.sliding_window": 0}),
    ],
)
def test_gguf_window_of_zero_is_none(architecture: str, keys: dict[str, Any], tmp_path: Path) -> None:
    arch = read_model_config(bare(tmp_path / "x.gguf", architecture, **keys), {})
    assert set(arch.layer_types or ("full_attention",)) == {"full_attention"} or arch.sliding_window is None


@pytest.mark.parametrize("keys", [{"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}])
def test_gguf_factor_without_type_is_linear(keys: dict[str, Any], tmp_path: Path) -> None:
    rope = read_model_config(bare(tmp_path / "x.gguf", **keys), {}).rope
    assert rope is not None
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_gguf_multipliers_of_zero_are_the_usual(tmp_path: Path) -> None:
    zero = {"logit_scale": 0.0, "embedding_scale": 0.0, "residual_scale": 0.0, "attention.scale": 0.0}
    usual = {"logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0, "attention.scale": 0.25}
    arches = [read_model_config(bare(tmp_path / "x.gguf", "granite", **each), {}) for each in (zero, usual)]
    assert arches[0] == arches[1]
    sizes = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None}
    both = [{"logit_scale": 0.0, **sizes}, {"logit_scale": 1.0, **sizes}]
    arches = [read_model_config(bare(tmp_path / "x.gguf", "command-r", **each), {}) for each in both]
    assert arches[0] == arches[1]


@pytest.mark.parametrize(("value", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_gguf_pooling_type_selects_the_runner(value: int, pooling: str, tmp_path: Path) -> None:
    path = bare(tmp_path / "x.gguf", "qwen3", pooling_type=value)
    config = prepare(EngineConfig.from_args(model=str(path), skip_tokenizer_init=True), "offline")
    assert config.pooling is not None
    assert (config.pooling.pooling, config.pooling.activation) == (pooling, "normalize")
    asked = EngineConfig.from_args(model=str(path), runner="generate", skip_tokenizer_init=True)
    assert prepare(asked, "offline").pooling is None
    said = EngineConfig.from_args(
        model=str(path), pooler_config={"pooling_type": "LAST"}, skip_tokenizer_init=True
    )
    assert getattr(prepare(said, "offline").pooling, "pooling", None) == "last"


def test_gguf_pooling_type_of_rankers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="pooling_type = 4 is not supported"):
        read_model_config(bare(tmp_path / "x.gguf", pooling_type=4), {})


def test_gguf_without_causal_attention_pools(tmp_path: Path) -> None:
    path = bare(tmp_path / "x.gguf", "llama", **{"attention.causal": False})
    assert read_model_config(path, {}).bidirectional


@pytest.mark.item(26)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight' is in none of the files"
    ):
        load_tiny(bare(tmp_path / "x.gguf"))


def test_value_heads_in_turn_are_those_of_one_rank(tmp_path: Path) -> None:
    path, _ = write_gguf("qwen35", tmp_path)
    layer = next(each for each in load_tiny(path).modules() if isinstance(each, GatedDeltaNet))
    message = (
        r"--tensor-parallel-size is 2, but model\.layers\.0\.linear_attn has its value heads in the order"
    )
    with pytest.raises(ConfigError, match=message):
        layer.apply_shard(Shard(0, 2))


@pytest.mark.item(26)
@pytest.mark.parametrize("numbers", [None, [0.5], [0.5, 0.5, float("nan")]], ids=["none", "one", "no-number"])
def test_parameters_in_the_metadata_are_one_for_each_layer(
    numbers: list[float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write_gguf("apertus", tmp_path)
    told = GgufModel.about

    def about(model: GgufModel, group: str) -> JsonObject:
        found = told(model, group)
        kept = {key: value for key, value in found.values.items() if key != "beta" or numbers is not None}
        if group == "xielu" and numbers is not None:
            kept["beta"] = numbers
        return JsonObject(found.where, kept)

    monkeypatch.setattr(GgufModel, "about", about)
    with pytest.raises(ModelLoadError, match=r"model\.gguf.*(beta|layers\.1\.mlp\.act_fn\.beta)"):
        load_tiny(path)


def test_the_other_load_format_is_refused(tmp_path: Path) -> None:
    path = bare(tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match=r"--load-format is safetensors, but .*x\.gguf is a model in gguf"):
        prepare(EngineConfig.from_args(model=str(path), load_format="safetensors"), "offline")
    with pytest.raises(ConfigError, match=r"--load-format is gguf, but .* is a model in safetensors"):
        prepare(EngineConfig.from_args(load_format="gguf"), "offline")


def test_the_docs_name_all_that_is_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text()
    section = page.partition("\n## GGUF\n")[2]
    assert all(f"`{name}`" in section for name in ARCHITECTURES)
    assert all(f" {kind.name}" in section for kind in READ.values())


def test_opened_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = bare(tmp_path / "model.gguf")
    first = opened_file(path)
    assert opened_file(path) is first
    bare(path, block_count=2)
    changed = opened_file(path)
    assert changed.metadata["llama.block_count"] == 2
    forget_files()
    assert opened_file(path) is not changed
    path.unlink()
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        opened_file(path)
