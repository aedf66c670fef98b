# SPDX-License-Identifier: Apache-2.0
"""config.json in, `ModelArch` or one clear error out."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quire.config import ModelArch
from quire.errors import ModelLoadError, StartupError, UnsupportedModelError
from quire.models.built_in import ALSO_CALLED, BUILT_IN, TRANSFORMERS
from quire.models.families.mamba import POSITIONS
from quire.models.generation_config import read_generation_config
from quire.models.hf_config import read_hf_config
from quire.models.registry import ModelRegistry
from tests.fixtures.folded import folded
from tests.fixtures.tiny_models import TINY_MODELS, VOCAB_SIZE

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
GPT_NEO: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "max_position_embeddings": 128,
    "attention_types": [[["global", "local"], 2]],
}
BLOOM: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4}
XGLM = {"vocab_size": 100, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}
MPT: dict[str, Any] = {"vocab_size": 100, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}
SPARSE = LLAMA | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = SPARSE | {"n_routed_experts": 8}
LATENT = DEEPSEEK | {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MIXTRAL = LLAMA | {"num_local_experts": 8}
OPENELM: dict[str, Any] = {
    "vocab_size": 100,
    "model_dim": 32,
    "num_transformer_layers": 2,
    "max_context_length": 128,
    "head_dim": 8,
    "num_query_heads": [2, 4],
    "num_kv_heads": [1, 2],
    "ffn_multipliers": [0.5, 4.0],
}
SOLAR: dict[str, Any] = {"bskcn_1": [0], "bskcn_2": [], "bskcn_3": [1], "bskcn_4": [], "bskcn_tv": [0.9, 0.8]}
DBRX: dict[str, Any] = MPT | {
    "attn_config": {},
    "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 16},
}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
}
STATES: dict[str, Any] = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4}
HYBRID = MIXTRAL | {"mamba_n_heads": 4, "mamba_d_head": 16}
OF_FAMILY: dict[str, dict[str, Any]] = dict.fromkeys(ModelRegistry.get_supported_archs(), LLAMA) | {
    "AfmoeForCausalLM": SPARSE,
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "DbrxForCausalLM": DBRX,
    "DeciLMForCausalLM": LLAMA | {"num_key_value_heads_per_layer": [1] * LLAMA["num_hidden_layers"]},
    "DeepseekForCausalLM": DEEPSEEK,
    "Dots1ForCausalLM": DEEPSEEK,
    "ArcticForCausalLM": MIXTRAL,
    "BailingHybridForCausalLM": LATENT,
    "BailingMoeForCausalLM": SPARSE,
    "BailingMoeV2ForCausalLM": SPARSE,
    "ExaoneMoeForCausalLM": SPARSE,
    "SolarOpenForCausalLM": DEEPSEEK,
    "Ernie4_5_MoeForCausalLM": SPARSE | {"moe_num_experts": 8},
    "FlexOlmoForCausalLM": SPARSE,
    "Glm4MoeForCausalLM": DEEPSEEK,
    "Glm4MoeLiteForCausalLM": LATENT,
    "GraniteMoeForCausalLM": MIXTRAL,
    "GraniteMoeSharedForCausalLM": MIXTRAL,
    "HunYuanMoEV1ForCausalLM": LLAMA | {"num_experts": 8, "moe_topk": 2},
    "JetMoeForCausalLM": MIXTRAL,
    "KimiLinearForCausalLM": LATENT,
    "MiniCPM3ForCausalLM": LATENT,
    "GptOssForCausalLM": MIXTRAL,
    "Llama4ForCausalLM": MIXTRAL,
    "MiniMaxForCausalLM": MIXTRAL,
    "MiniMaxM2ForCausalLM": MIXTRAL,
    "MiniMaxText01ForCausalLM": MIXTRAL | {"attn_type_list": [0, 1] * (LLAMA["num_hidden_layers"] // 2)},
    "Ministral3ForCausalLM": LLAMA | {"head_dim": 8, "rope_parameters": MINISTRAL3_ROPE},
    "MixtralForCausalLM": MIXTRAL,
    "OlmoeForCausalLM": SPARSE,
    "PhimoeForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": SPARSE,
    "Lfm2MoeForCausalLM": SPARSE,
    "Qwen3MoeForCausalLM": SPARSE,
    "Qwen3NextForCausalLM": SPARSE,
    "Qwen3_5MoeForCausalLM": SPARSE,
    "YoutuForCausalLM": LATENT,
    "BambaForCausalLM": HYBRID,
    "Zamba2ForCausalLM": LLAMA
    | {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
    },
    "FalconH1ForCausalLM": HYBRID | {"mamba_d_ssm": 64},
    "FalconMambaForCausalLM": STATES,
    "Gemma3nForCausalLM": LLAMA | {"num_hidden_layers": 12, "num_kv_shared_layers": 2},
    "GraniteMoeHybridForCausalLM": HYBRID,
    "JambaForCausalLM": SPARSE,
    "Mamba2ForCausalLM": STATES | {"num_heads": 8, "head_dim": 8},
    "MambaForCausalLM": STATES,
    "NemotronHForCausalLM": LLAMA | {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    "BloomForCausalLM": BLOOM,
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": GPT2,
    "CodeGenForCausalLM": GPT2 | {"n_head": 4, "rotary_dim": 4},
    "GPTJForCausalLM": GPT2 | {"rotary_dim": 4},
    "GPTNeoForCausalLM": GPT_NEO,
    "JAISLMHeadModel": GPT2 | {"activation_function": "swiglu"},
    "MPTForCausalLM": MPT,
    "MptForCausalLM": MPT,
    "OpenELMForCausalLM": OPENELM,
    "RWKV7ForCausalLM": STATES
    | dict.fromkeys(
        ("decay_low_rank_dim", "v_low_rank_dim", "a_low_rank_dim", "gate_low_rank_dim", "head_dim"), 16
    ),
    "OPTForCausalLM": OPT,
    "SolarForCausalLM": LLAMA | SOLAR,
    "XGLMForCausalLM": XGLM,
}
OF_FAMILY = {arch: values | {"architectures": [arch]} for arch, values in OF_FAMILY.items()}
WITH_ORACLE = [row.architecture for row in BUILT_IN.values() if row.oracle == TRANSFORMERS]
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
OF_STATES = dict.fromkeys(
    ("mamba", "mamba2", "gated_delta", "kimi_delta", "lightning", "recurrent_unit"), "linear_attention"
) | {
    "short_conv": "conv",
    "latent_attention": "full_attention",
    "differential_attention": "full_attention",
    "mixture_of_attention": "full_attention",
    "attention_and_mamba2": "hybrid",
}
"""What transformers calls layers that keep something else than keys and values."""
ABSENT = object()


def read(directory: Path, values: dict[str, Any], **overrides: Any) -> ModelArch:
    kept = {key: value for key, value in values.items() if value is not ABSENT}
    (directory / "config.json").write_text(json.dumps(kept))
    return read_hf_config(directory, overrides)


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_sizes_match_transformers_configs(name: str, tiny_model: Callable[[str], Path]) -> None:
    arch = read_hf_config(tiny_model(name), {})
    theirs = TINY_MODELS[name]()
    theirs.allow_global_per_layer_attribute_access = True
    assert arch.vocab_size == theirs.vocab_size == VOCAB_SIZE
    assert arch.hidden_size == theirs.hidden_size
    assert arch.num_layers == len(arch.layer_types) == theirs.num_hidden_layers
    if theirs.model_type != "falcon":  # there other flags than the number of heads decide
        heads = getattr(theirs, "num_attention_heads", 0)
        assert arch.num_kv_heads == getattr(theirs, "num_key_value_heads", heads)
    assert arch.tie_word_embeddings == theirs.tie_word_embeddings
    longest = getattr(theirs, "max_position_embeddings", None) or getattr(theirs, "max_seq_len", 2048)
    longest = longest if arch.num_heads else POSITIONS
    assert arch.max_position_embeddings == longest
    assert (arch.dtype, arch.bos_token_id, arch.eos_token_ids) == ("float32", 1, (2,))


@folded("arch", sorted({*WITH_ORACLE} - {"GPTNeoForCausalLM"}))
def test_defaults_are_those_of_the_family(arch: str, tmp_path: Path) -> None:
    """Keys absent from config.json have the defaults of transformers' config class."""
    import transformers

    ours = read(tmp_path, OF_FAMILY[arch])
    config_class = getattr(transformers, arch).config_class
    theirs = config_class(**{key: value for key, value in OF_FAMILY[arch].items() if key != "model_type"})
    theirs.allow_global_per_layer_attribute_access = True
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    if ours.num_heads:
        layers = getattr(theirs, "per_layer_config", None) or [theirs]
        head_dim = max(getattr(layer, "head_dim", None) or 0 for layer in layers)
        assert ours.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 9
    kinds = [OF_STATES.get(kind, kind) for kind in ours.layer_types]
    assert kinds == types[: ours.num_layers]
    assert ours.sliding_window == (window if "sliding_attention" in types else None)
    eps = next((value for key in EPSILONS if (value := getattr(theirs, key, None))), 1e-5)
    assert ours.norm_eps == eps
    assert ours.attn_logit_softcap == getattr(theirs, "attn_logit_softcapping", None)
    cap = getattr(theirs, "final_logit_softcapping", None) or getattr(theirs, "logits_soft_cap", None)
    assert ours.final_logit_softcap == cap


def test_both_rope_layouts_are_equivalent(tmp_path: Path) -> None:
    rope = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    older = read(tmp_path, LLAMA | {"rope_theta": 5e5, "rope_scaling": rope | {"type": "llama3"}})
    newer = read(tmp_path, LLAMA | {"rope_parameters": rope | {"rope_type": "llama3", "rope_theta": 5e5}})
    assert older.rope == newer.rope
    assert older.rope is not None
    assert (older.rope.kind, older.rope.theta, older.rope.original_max_position) == ("llama3", 5e5, 64)


def test_gemma3_ropes_in_both_layouts(tmp_path: Path) -> None:
    gemma = OF_FAMILY["Gemma3ForCausalLM"]
    linear = {"rope_type": "linear", "factor": 8.0}
    older = read(tmp_path, gemma | {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": linear})
    nested = {
        "full_attention": linear | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    newer = read(tmp_path, gemma | {"rope_parameters": nested})
    assert (older.rope, older.rope_local) == (newer.rope, newer.rope_local)
    assert older.rope is not None
    assert older.rope_local is not None
    assert (older.rope.theta, older.rope.factor) == (1e6, 8.0)
    assert (older.rope_local.theta, older.rope_local.kind) == (2e4, "default")


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_names_for_longrope(name: str, tmp_path: Path) -> None:
    rope = {"type": name, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi3 = OF_FAMILY["Phi3ForCausalLM"] | {"original_max_position_embeddings": 32, "rope_scaling": rope}
    arch = read(tmp_path, phi3)
    assert arch.rope is not None
    assert (arch.rope.kind, arch.rope.factor, arch.rope.original_max_position) == ("longrope", 4.0, 32)


def test_layer_types_listed_one_by_one(tmp_path: Path) -> None:
    gemma = OF_FAMILY["Gemma2ForCausalLM"]
    assert read(tmp_path, gemma | {"layer_types": ["full_attention"] * 4}).sliding_window is None
    mixed = ["full_attention", "sliding_attention"] * 2
    assert read(tmp_path, gemma | {"layer_types": mixed, "sliding_window": 7}).layer_types == tuple(mixed)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_either_name(key: str, tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {key: "bfloat16"}).dtype == "bfloat16"


def test_overrides_replace_keys(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, num_hidden_layers=2, rms_norm_eps=1e-3).norm_eps == 1e-3
    assert read(tmp_path, LLAMA, num_hidden_layers=2).num_layers == 2


def test_generation_config(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "eos_token_id": [7, 3, 500],
        "max_length": 20,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    arch = read(tmp_path, LLAMA | {"eos_token_id": 3})
    assert arch.generation == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert isinstance(arch.generation["top_k"], int)
    assert arch.eos_token_ids == (3, 7), "config.json's first, no repetition, none outside the vocabulary"


def test_generation_config_limit_is_a_default(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7, "do_sample": True}))
    assert read(tmp_path, LLAMA).generation == {"max_new_tokens": 7}


@pytest.mark.parametrize(
    ("key", "value"),
    [("do_sample", False), ("num_beams", 4), ("stop_strings", ["x"]), ("eos_token_id", 10**6)],
)
def test_generation_config_key_not_applied_is_warned_of(
    key: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with caplog.at_level("WARNING"):
        read(tmp_path, LLAMA)
    assert key in caplog.text


def test_generation_config_neutral_values_are_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "max_length": 20, "suppress_tokens": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(neutral))
    with caplog.at_level("WARNING"):
        read(tmp_path, LLAMA)
    assert not caplog.text


@pytest.mark.item(26)
@folded(
    ("changes", "words"),
    [
        ({"vocab_size": ABSENT}, ["'vocab_size' is missing"]),
        ({"architectures": ABSENT}, ["'architectures' is missing"]),
        ({"architectures": []}, ["architectures must be"]),
        ({"hidden_size": "32"}, ["hidden_size must be an integer", '"32"']),
        ({"hidden_size": True}, ["hidden_size must be an integer", "true"]),
        ({"hidden_size": 30}, ["hidden_size must be a multiple of the number of heads (4)", "30"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers must be an integer in [1, 1024]", "0"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers must be an integer in [1, 1024]", "1000000000"]),
        ({"vocab_size": 2**40}, ["vocab_size must be", str(2**40)]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads must be a divisor", "4", "3"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps must be a number", "NaN"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings must be true or false"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id must be a token id"]),
        ({"rope_scaling": [1]}, ["rope_scaling must be a JSON object"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "'factor' is missing"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            ["rope_scaling", "factor must be a number in [1,"],
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            ["4 numbers", "[1]"],
        ),
        ({"rope_theta": -1}, ["rope_theta must be a number in [1,"]),
    ],
)
def test_malformed_values(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(tmp_path, LLAMA | changes)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(error.value)


@folded(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "mystery"}}, ['rope_type = "mystery"', "llama3", "yarn"]),
        ({"hidden_act": "mish"}, ['hidden_act = "mish"', "silu"]),
        (
            {"quantization_config": {"quant_method": "mystery"}},
            ["quantization_config", "mystery", "known are", "gptq"],
        ),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder = true"]),
        ({"alibi": True}, ["alibi = true"]),
        (
            {"architectures": ["GemmaForCausalLM"], "is_causal": False},
            ["is_causal = false", "absent or true"],
        ),
        (
            {"architectures": ["MistralForCausalLM"], "is_causal": False, "sliding_window": 8},
            ["is_causal = false", "true where layers have windows"],
        ),
        ({"torch_dtype": "float8_e4m3fn"}, ['torch_dtype = "float8_e4m3fn"', "bfloat16"]),
        ({"partial_rotary_factor": 0.4}, ["partial_rotary_factor = 0.4", "even part of head_dim 8"]),
        (
            {"architectures": ["MysteryForCausalLM"]},
            ["'MysteryForCausalLM'", "nearest by name", "MistralForCausalLM"],
        ),
    ],
)
def test_unsupported_options(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(tmp_path, LLAMA | changes)
    for word in words:
        assert word in str(error.value)


def test_vision_part_is_not_mistaken_for_a_text_model(tmp_path: Path) -> None:
    parts = {"architectures": ["Idefics2ForConditionalGeneration"], "text_config": LLAMA}
    with pytest.raises(
        UnsupportedModelError, match="is multimodal, or consists of several models; those supported"
    ):
        read(tmp_path, parts)


def test_malformed_and_unsupported_values_are_named_at_once(tmp_path: Path) -> None:
    changes = {"vocab_size": 0, "rms_norm_eps": "small", "hidden_act": "mish", "rope_theta": 0}
    with pytest.raises(ModelLoadError) as error:
        read(tmp_path, LLAMA | changes)
    for word in ("vocab_size must be", "got 0", "rms_norm_eps must be", "mish", "rope_theta must be"):
        assert word in str(error.value)


def test_consequences_of_a_malformed_value_are_not_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"num_attention_heads must be .*, got -3$"):
        read(tmp_path, LLAMA | {"num_attention_heads": -3})


@folded(("name", "row"), ALSO_CALLED.items())
def test_names_that_makers_gave_are_those_of_the_table(name: str, row: str, tmp_path: Path) -> None:
    found = []
    for architecture in (name, row):
        with contextlib.suppress(StartupError):
            found.append(read(tmp_path, LLAMA | {"architectures": [architecture]}))
    assert row in BUILT_IN
    assert name not in BUILT_IN
    assert len(found) != 1
    assert found[:1] == found[1:]


def test_ernie_mtp_weights_are_ignored(tmp_path: Path) -> None:
    sizes = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "use_bias": False}
    arch = read(tmp_path, LLAMA | sizes | {"architectures": ["Ernie4_5_MoeForCausalLM"]})
    for name in ("mtp_block.0.mlp.up_proj.weight", "mtp_emb_norm.0.weight", "mtp_linear_proj.0.weight"):
        assert any(re.search(pattern, f"model.{name}") for pattern in arch.names.unused)


BITS = {"quant_method": "gptq", "bits": 5, "checkpoint_format": "marlin"}


def test_all_unsupported_options_are_named_at_once(tmp_path: Path) -> None:
    changes = {"hidden_act": "mish", "quantization_config": BITS, "rope_scaling": {"type": "mystery"}}
    with pytest.raises(UnsupportedModelError) as error:
        read(tmp_path, LLAMA | changes)
    for word in ("mish", "bits = 5", "mystery"):
        assert word in str(error.value)


@folded(
    ("arch", "changes", "words"),
    [
        (
            "MptForCausalLM",
            {"attn_config": {"alibi": False, "qk_ln": True}},
            ["alibi = false", "qk_ln = true"],
        ),
        ("MptForCausalLM", {"no_bias": False, "logit_scale": 0.5}, ["no_bias = false", "logit_scale = 0.5"]),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, ["post_layernorm = true"]),
        ("ChatGLMModel", {"rmsnorm": False, "pre_seq_len": 5}, ["rmsnorm = false", "pre_seq_len = 5"]),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, ["use_cla = true"]),
        ("MiniCPMForCausalLM", {"sparse_config": {"topk": 64}}, ["sparse_config"]),
        ("QWenLMHeadModel", {"no_bias": False}, ["no_bias = false"]),
        (
            "FalconForCausalLM",
            {"new_decoder_architecture": True, "parallel_attn": False},
            ["parallel_attn = false"],
        ),
        ("ApertusForCausalLM", {"hidden_act": "silu"}, ['hidden_act = "silu"', "xielu"]),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, ["use_sliding_window = true"]),
        ("MambaForCausalLM", {"hidden_act": "gelu"}, ['hidden_act = "gelu"']),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M-X*"},
            ["hybrid_override_pattern", "M, *, - and E"],
        ),
        ("NemotronHForCausalLM", {"layers_block_type": ["conv"]}, ["layers_block_type", "full_attention"]),
        (
            "KimiLinearForCausalLM",
            {"mla_use_nope": False, "moe_router_activation_func": "softmax", "q_lora_rank": 24},
            ["mla_use_nope = false", 'moe_router_activation_func = "softmax"', "q_lora_rank = 24"],
        ),
        (
            "Gemma3nForCausalLM",
            {"altup_active_idx": 1, "intermediate_size": [64, 32] * 6},
            ["altup_active_idx = 1", "intermediate_size"],
        ),
    ],
)
def test_unsupported_options_of_a_family(
    arch: str, changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read(tmp_path, OF_FAMILY[arch] | changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"n_groups": 3}, "a divisor of the number of heads"),
        ({"time_step_limit": [0.0]}, "a list of two numbers"),
        ({"time_step_limit": [0.0, {"__float__": "NaN"}]}, "a list of two numbers"),
        ({"conv_kernel": 1}, "conv_kernel"),
    ],
)
def test_malformed_values_of_states(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=word):
        read(tmp_path, OF_FAMILY["Mamba2ForCausalLM"] | changes)


@pytest.mark.parametrize(
    ("arch", "changes", "word"),
    [
        ("FalconH1ForCausalLM", {"mamba_d_ssm": 48}, "mamba_d_head must be mamba_d_ssm / mamba_n_heads"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5 numbers"),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 9}, "a layer of each kind has keys and values"),
        ("Gemma3nForCausalLM", {"activation_sparsity_pattern": [1.0] * 12}, "activation_sparsity_pattern"),
    ],
)
def test_malformed_values_of_a_family(arch: str, changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=word):
        read(tmp_path, OF_FAMILY[arch] | changes)


def test_baichuan_variants_are_distinguished_by_size(tmp_path: Path) -> None:
    baichuan = LLAMA | {"num_key_value_heads": ABSENT}
    for architecture, hidden_size, is_rotary in (
        ("BaiChuanForCausalLM", 32, True),
        ("BaichuanForCausalLM", 4096, True),
        ("BaichuanForCausalLM", 5120, False),
    ):
        arch = read(tmp_path, baichuan | {"architectures": [architecture], "hidden_size": hidden_size})
        assert (arch.rope is not None, arch.alibi is None) == (is_rotary, is_rotary)
        assert not arch.head_of_unit_rows
    second = {"architectures": ["BaichuanForCausalLM"], "vocab_size": 125696}
    assert read(tmp_path, baichuan | second).head_of_unit_rows


def test_gpt2_errors_bear_its_own_key_names(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="n_layer must be"):
        read(tmp_path, GPT2 | {"n_layer": -1})
    with pytest.raises(UnsupportedModelError, match="scale_attn_by_inverse_layer_idx = true"):
        read(tmp_path, GPT2 | {"scale_attn_by_inverse_layer_idx": True})


@folded("text", ["", "{", "[]", "\x00", '{"a": 1e5000', "[" * 100_000])
def test_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_hf_config(tmp_path, {})


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: no such file"):
        read_hf_config(tmp_path, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])},
    optional={
        key: st.floats() | JSON
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "short_factor",
            "long_factor",
            "rope_theta",
        )
    },
)
KEYS = sorted(
    {
        *LLAMA,
        *OPT,
        *GPT2,
        *GPT_NEO,
        *BLOOM,
        *MPT,
        "head_dim",
        "sliding_window",
        "layer_types",
        "use_sliding_window",
        "eos_token_id",
        "dtype",
    }
    | {"partial_rotary_factor", "original_max_position_embeddings", "quantization_config", "hidden_act"}
)


@pytest.mark.item(26, 58)
@settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    family=st.sampled_from(sorted(OF_FAMILY)),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    rope=st.none() | ROPE | JSON,
)
@example(family="LlamaForCausalLM", changes={"head_dim": 10**400}, rope=None)
def test_any_json_gives_an_arch_or_a_startup_error(
    family: str, changes: dict[str, Any], rope: Any, tmp_path: Path
) -> None:
    with contextlib.suppress(StartupError):
        read(tmp_path, OF_FAMILY[family] | changes | {"rope_parameters": rope})


def test_reading_loads_no_torch() -> None:
    code = "import sys, quire.models.hf_config, quire.models.checkpoint; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@folded(
    ("values", "words"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok must be an integer in \[1, 8\], got 9"),
        ({"n_group": 3}, r"n_group must be a divisor of n_routed_experts \(8\), got 3"),
        ({"n_group": 4, "topk_group": 5}, r"topk_group must be an integer in \[1, 4\], got 5"),
        (
            {"n_group": 4, "num_experts_per_tok": 3},
            r"num_experts_per_tok must be an integer in \[1, 2\], got 3",
        ),
        ({"n_routed_experts": 5000}, r"n_routed_experts must be an integer in \[1, 4096\], got 5000"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported; it must be one of silu'),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=words):
        read(tmp_path, OF_FAMILY["Glm4MoeForCausalLM"], **values)


def test_latent_sizes_that_no_kernel_takes_are_refused(tmp_path: Path) -> None:
    for key, size, unit in (("kv_lora_rank", 24, 16), ("v_head_dim", 24, 16), ("qk_rope_head_dim", 12, 8)):
        with pytest.raises(
            UnsupportedModelError, match=f"{key} = {size} is not supported; it must be a multiple of {unit}"
        ):
            read(tmp_path, OF_FAMILY["DeepseekV3ForCausalLM"] | {key: size})


def test_checkpoints_of_deepseek_v3_are_in_blocks_of_fp8(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    arch = read(tmp_path, OF_FAMILY["DeepseekV3ForCausalLM"] | {"quantization_config": fp8})
    assert arch.quantization is not None
    encoding = arch.quantization.encoding_of("model.layers.1.mlp.experts.0.up_proj")
    assert encoding is not None
    assert encoding.options == {"grid_outputs": 128, "grid_inputs": 128, "scale": "weight_scale_inv"}


@pytest.mark.parametrize("rank", [None, 24])
def test_scores_are_scaled_as_positions_are_stretched(rank: int | None, tmp_path: Path) -> None:
    yarn = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    values = OF_FAMILY["DeepseekV3ForCausalLM"] | {"q_lora_rank": rank}
    plain, stretched = read(tmp_path, values), read(tmp_path, values | {"rope_scaling": yarn})
    assert plain.attention_scale == 24**-0.5
    assert stretched.attention_scale == pytest.approx(24**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_minimax_as_published_rotates_a_part_of_each_head(tmp_path: Path) -> None:
    """transformers' own class rotates all of it, so no logits show this."""
    values = OF_FAMILY["MiniMaxText01ForCausalLM"] | {"rotary_dim": 4}
    arch = read(tmp_path, values)
    assert arch.rope is not None
    assert (arch.head_dim, arch.rope.rotated(arch.head_dim)) == (8, 4)


def test_config_json_sampling_defaults_apply_without_their_file(tmp_path: Path) -> None:
    sampling = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 1.0, "repetition_penalty": 1.4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sampling))
    assert read_generation_config(tmp_path) == {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.4}
    path.write_text(json.dumps({**sampling, "do_sample": False}))
    assert read_generation_config(tmp_path) == {}
    path.write_text(json.dumps(sampling))
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_generation_config(tmp_path) == {}


@pytest.mark.parametrize("key", ["temprature", "presence_penalty", "stop_token_ids", "num_return_sequences"])
def test_generation_config_key_unknown_is_warned_of(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: 2, "_from_model_config": True}))
    with caplog.at_level(logging.WARNING, "quire"):
        assert read_generation_config(tmp_path) == {}
    assert key in caplog.text
    assert "_from_model_config" not in caplog.text
    caplog.clear()
    assert read_generation_config(tmp_path, read_elsewhere={key}) == {}
    assert key not in caplog.text
