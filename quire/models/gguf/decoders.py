# SPDX-License-Identifier: Apache-2.0
"""GGUF attention-only architectures: dense decoders, BERT-like encoders, Gemma 3n and latent attention.

Encoders are BERT and what converters write under its name (XLM-RoBERTa, MiniLM, E5, BGE); `deepseek2` is DeepSeek-V2,
V3 and all models with their latent attention. See `architectures`.

Invariant: torch-free. Values that llama.cpp hard-codes for an architecture are hard-coded here, too.
"""

from __future__ import annotations

from statistics import NormalDist

from quire.errors import ModelLoadError
from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import (
    SANDWICH,
    SIZES,
    Config,
    Listed,
    TensorPlace,
    TensorPlaces,
    biased,
    dense,
    named,
    num_mtp_layers,
    rotary,
    windows,
)
from quire.models.gguf.sparse import BALANCED, SIGMOID, SOFTMAX, deepseek_experts
from quire.models.json_object import JsonObject

BERT_PLACES: TensorPlaces = {
    "token_types": "model.embed_token_types",
    "position_embd": "model.embed_positions",
    "token_embd_norm": "model.embed_norm",
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_feedforward_layernorm",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}


def bert(model: GgufModel) -> Config:
    """BERT; positions are the table's rows: converters drop RoBERTa's padding rows."""
    tables = {"type_vocab_size": "token_types.weight", "max_position_embeddings": "position_embd.weight"}
    missing = [name for name in tables.values() if name not in model.tensors]
    if missing:
        raise ModelLoadError(f"{model.path}: tensor {missing[0]!r} is missing")
    rows = {key: model.tensors[name][1].shape[0] for key, name in tables.items()}
    model.own.get("context_length")
    return named(model, _SIZES) | rows | {"architectures": ["BertModel"]}


GEMMA3N_PLACES: TensorPlaces = {
    **SANDWICH,
    "per_layer_token_embd": "model.token_rows.embed_tokens_per_layer",
    "per_layer_model_proj": "model.token_rows.per_layer_model_projection",
    "per_layer_proj_norm": "model.token_rows.per_layer_projection_norm",
    "altup_proj": TensorPlace("model.altup_projections.{}", apart=True),
    "altup_unembd_proj": TensorPlace("model.altup_unembed_projections.{}", apart=True),
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "inp_gate": "token_row.per_layer_input_gate",
    "proj": "token_row.per_layer_projection",
    "post_norm": "token_row.post_per_layer_input_norm",
}
_LAYERS_WITH_KEYS = 20
"""Default for files that do not say how many layers share keys and values."""


def gemma3n(model: GgufModel) -> Config:
    """Gemma 3n; sizes without keys come from tensors; sparsity is stored as normal quantiles."""
    own = model.own
    keys = {
        "altup_active_idx": "altup.active_idx",
        "altup_num_inputs": "altup.num_inputs",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope_local_base_freq": "rope.freq_base_swa",
    }
    config = dense(model, "Gemma3nForCausalLM", **named(model, keys)) | windows(model)
    layers = config["num_hidden_layers"]
    config["num_kv_shared_layers"] = own.integer(
        "attention.shared_kv_layers", max(layers - _LAYERS_WITH_KEYS, 0), low=0
    )
    if "activation_sparsity_scale" in own:
        config["activation_sparsity_pattern"] = _sparsity(own)
    widths = {
        "laurel_rank": "blk.0.laurel_l.weight",
        "vocab_size_per_layer_input": "per_layer_token_embd.weight",
    }
    return config | {
        key: model.tensors[name][1].shape[0] for key, name in widths.items() if name in model.tensors
    }


def _sparsity(own: JsonObject) -> list[float]:
    """Return the sparsity of each layer; minus infinity stands for none, so this is no list of finite numbers."""
    deviations = own.get("activation_sparsity_scale")
    if not isinstance(deviations, list) or not all(isinstance(each, float) for each in deviations):
        raise own.wrong("activation_sparsity_scale", "a list of numbers")
    return [NormalDist().cdf(each) for each in deviations]


LATENT_PLACES: TensorPlaces = {
    **BALANCED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": TensorPlace("self_attn.k_up", rows=True),
    "attn_v_b": TensorPlace("self_attn.v_up", rows=True),
}
"""Key projections are stored transposed, for multiplication with queries."""
_LATENT_SIZES = {key: name for key, name in SIZES.items() if key not in ("head_dim", "num_key_value_heads")}


def deepseek2(model: GgufModel) -> Config:
    """DeepSeek and relatives: sigmoid routing in V3 and later, no experts in Youtu.

    The old layout, one matrix for keys and values, is refused.
    """
    own = model.own
    if "blk.0.attn_k_b.weight" not in model.tensors:
        own.refuse("attention.key_length_mla", "present, with separate key and value projections (attn_k_b)")
    rotated, key, value = (
        own.integer("rope.dimension_count"),
        own.integer("attention.key_length_mla"),
        own.integer("attention.value_length_mla"),
    )
    for name in ("attention.key_length", "attention.value_length", "attention.head_count_kv", "vocab_size"):
        own.get(name)  # follow from others
    keys = {"kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank"}
    config = named(model, {**_LATENT_SIZES, **keys}) | deepseek_experts(model)
    return config | {
        "num_hidden_layers": own.integer("block_count") - num_mtp_layers(model),
        **_routing(model, config),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "attention_bias": biased(model, "attn_kv_a_mqa"),
        **_rope(model, rotated),
    }


def _routing(model: GgufModel, config: Config) -> Config:
    """Return the family, by its routing; in files that do not say it, a bias implies sigmoid routing."""
    if not config.get("n_routed_experts"):
        return {"architectures": ["YoutuForCausalLM"]}
    corrected = any(name.endswith(".exp_probs_b.bias") for name in model.tensors)
    if model.own.integer("expert_gating_func", SIGMOID if corrected else SOFTMAX) == SIGMOID:
        v3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        return v3 | {"architectures": ["DeepseekV3ForCausalLM"]}
    limited = config.get("n_group", 1) > 1
    v2 = {"topk_method": "group_limited_greedy" if limited else "greedy"}
    return v2 | {"architectures": ["DeepseekV2ForCausalLM"]}


def _rope(model: GgufModel, rotated: int) -> Config:
    """Return rope with YaRN's score scale, of which files store a tenth."""
    config = rotary(model, rotated)
    if config["rope_scaling"].get("rope_type") == "yarn":
        scale = 10.0 * model.own.number("rope.scaling.yarn_log_multiplier", 0.0)
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return config


LAYER_NORM_SIZES = {key: name for key, name in SIZES.items() if key != "rms_norm_eps"}
XIELU: Listed = {
    "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
    "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
    "xielu.beta": ("mlp.act_fn.beta", ()),
}
"""Learned parameters of an activation. Its bounds in the metadata are too large to matter in floats."""


def olmo2(model: GgufModel) -> Config:
    """OLMo 2, and OLMo 3, which has windows; rope of windowed layers is not scaled."""
    if not model.own.integer("attention.sliding_window", 0, low=0):
        return dense(model, "Olmo2ForCausalLM")
    model.own.only("rope.freq_base_swa", model.own.number("rope.freq_base"))
    return dense(model, "Olmo3ForCausalLM") | windows(model)


def exaone4(model: GgufModel) -> Config:
    """Exaone 4; if layers have windows, the others have no positions."""
    has_windows = model.own.integer("attention.sliding_window", 0, low=0)
    config = dense(model, "Exaone4ForCausalLM")
    return config | (windows(model) if has_windows else {"sliding_window": None, "sliding_window_pattern": 4})


def seed_oss(model: GgufModel) -> Config:
    return dense(
        model,
        "SeedOssForCausalLM",
        attention_bias=biased(model, "attn_q"),
        attention_out_bias=biased(model, "attn_output"),
        mlp_bias=biased(model, "ffn_up"),
    )


def smollm3(model: GgufModel) -> Config:
    """SmolLM 3; every fourth layer has no positions."""
    return dense(model, "SmolLM3ForCausalLM", attention_bias=biased(model, "attn_q"))


def ernie(model: GgufModel) -> Config:
    return dense(model, "Ernie4_5ForCausalLM", use_bias=biased(model, "attn_q"))


def glm4(model: GgufModel) -> Config:
    """GLM-4 of 2025."""
    return dense(model, "Glm4ForCausalLM", attention_bias=biased(model, "attn_q"))


def mistral3(model: GgufModel) -> Config:
    """Ministral 3, whose queries are scaled by position."""
    model.own.only("expert_count", 0)
    model.own.only("expert_used_count", 0)
    config = dense(model, "Ministral3ForCausalLM")
    # Equal values: scores are not scaled by YaRN.
    model.own.number("rope.scaling.yarn_log_multiplier", 1.0)
    rope = config.pop("rope_scaling") | {
        "rope_theta": model.own.number("rope.freq_base"),
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": model.own.number("attention.temperature_scale"),
    }
    return config | {"rope_parameters": rope}


def arcee(model: GgufModel) -> Config:
    return dense(model, "ArceeForCausalLM", mlp_bias=biased(model, "ffn_up"), hidden_act="relu2")


def apertus(model: GgufModel) -> Config:
    return dense(model, "ApertusForCausalLM", attention_bias=biased(model, "attn_q"))


def internlm2(model: GgufModel) -> Config:
    return dense(model, "InternLM2ForCausalLM", bias=biased(model, "attn_q"))


def starcoder2(model: GgufModel) -> Config:
    """StarCoder 2; its window is not in the file, and equals its training context."""
    eps = {"norm_epsilon": "attention.layer_norm_epsilon"}
    return dense(
        model,
        "Starcoder2ForCausalLM",
        LAYER_NORM_SIZES,
        **named(model, eps),
        use_bias=biased(model, "attn_q"),
    )


def stablelm(model: GgufModel) -> Config:
    """StableLM 2; only the 12B model has norms of q and k."""
    eps = {"layer_norm_eps": "attention.layer_norm_epsilon", "use_parallel_residual": "use_parallel_residual"}
    return dense(
        model,
        "StableLmForCausalLM",
        LAYER_NORM_SIZES,
        **named(model, eps),
        use_qkv_bias=biased(model, "attn_q"),
        qk_layernorm="blk.0.attn_q_norm.weight" in model.tensors,
    )


def command_r(model: GgufModel) -> Config:
    """Command R and Aya; Command R+ has norms of q and k."""
    return _cohere(model, "CohereForCausalLM", use_qk_norm="blk.0.attn_q_norm.weight" in model.tensors)


def cohere2(model: GgufModel) -> Config:
    """Cohere 2; all layers but every fourth have the window; the fourth has no positions."""
    window = {"sliding_window": "attention.sliding_window"}
    return _cohere(model, "Cohere2ForCausalLM", **named(model, window), sliding_window_pattern=4)


def _cohere(model: GgufModel, architecture: str, **more: object) -> Config:
    keys = {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
    scale = {"logit_scale": 1.0} if model.own.get("logit_scale") == 0 else {}
    return dense(model, architecture, LAYER_NORM_SIZES, **named(model, keys), **scale, **more)


def hunyuan(model: GgufModel) -> Config:
    """Hunyuan dense; the file's rotary base is already scaled."""
    return dense(model, "HunYuanDenseV1ForCausalLM", use_qk_norm=True)


def chatglm(model: GgufModel) -> Config:
    """ChatGLM 2 and 3, and GLM-4 9B of 2024."""
    return dense(model, "GlmForCausalLM", attention_bias=biased(model, "attn_q"))


def nemotron(model: GgufModel) -> Config:
    """Nemotron; the converter writes the layer norms' epsilon twice."""
    model.own.get("attention.layer_norm_rms_epsilon")
    eps = {"norm_eps": "attention.layer_norm_epsilon"}
    return dense(model, "NemotronForCausalLM", LAYER_NORM_SIZES, **named(model, eps))


def olmo(model: GgufModel) -> Config:
    """OLMo; its norms have no weights and a fixed epsilon."""
    model.own.get("attention.layer_norm_epsilon")
    return dense(
        model, "OlmoForCausalLM", LAYER_NORM_SIZES, **named(model, {"clip_qkv": "attention.clamp_kqv"})
    )


def phi2(model: GgufModel) -> Config:
    """Phi-1 to Phi-2. The converter assumes that MLPs are four times as wide as the model."""
    eps = {"layer_norm_eps": "attention.layer_norm_epsilon"}
    config = dense(model, "PhiForCausalLM", LAYER_NORM_SIZES, **named(model, eps))
    up = model.tensors.get("blk.0.ffn_up.weight")
    return config | ({"intermediate_size": up[1].shape[0]} if up else {})
