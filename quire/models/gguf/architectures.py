"""The architectures that quire reads from GGUF: which family of Hugging Face's each is, and what it calls things.

Invariant: torch-free. A row's `config` makes the keys of config.json that the family's reader takes, and says no more
than that; it asks `GgufModel.own` for every key of the architecture that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.models.families.fields import MAX_LAYERS
from quire.models.gguf.model import GgufModel
from quire.models.gguf.tensor_names import SANDWICH, Place, Places

FREQUENCIES = "rope_freqs.weight"
"""What rotary frequencies are divided by: Llama 3's scaling, computed when the file was made."""
FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
Config = dict[str, Any]

_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_EXPERTS = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture, by its name in `general.architecture`."""

    config: Callable[[GgufModel], Config]
    """The keys of config.json, but for those that every file has."""
    interleaved: bool = False
    """Whether rotated dimensions lie in pairs: the files of some families have q and k in that order."""
    merged: bool = False
    """Whether q, k and v, and gate and up, are one tensor each."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of `ModelArch`, what is otherwise in these files than in the family's own."""
    places: Places = field(default_factory=dict)
    """Of tensors that are elsewhere than `tensor_names.SHARED` says."""


def _named(model: GgufModel, keys: Mapping[str, str]) -> Config:
    """Keys of config.json by the architecture's; a list, with a number for each layer, stands for one if all agree."""
    values = {name: model.own.get(key) for name, key in keys.items() if key in model.own}
    for name, value in values.items():
        if isinstance(value, list):
            if len(set(value)) != 1:
                model.own.refuse(keys[name], "the same in all layers")
            values[name] = value[0]
    return values


def _dense(model: GgufModel, architecture: str, sizes: Mapping[str, str] = _SIZES, **more: Any) -> Config:
    """What all have: sizes and the rotary embedding."""
    config = _named(model, sizes) | {"architectures": [architecture]}
    share = model.own.integer("embedding_length") // model.own.integer("attention.head_count")
    config.setdefault("head_dim", share)
    model.own.only("attention.value_length", config["head_dim"])
    return config | _rope(model, config["head_dim"]) | more


def _rope(model: GgufModel, head_dim: int) -> Config:
    own = model.own
    rotated = own.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    kind = own.choice("rope.scaling.type", ("none", "linear", "yarn", "longrope"), "none")
    short, long = (model.floats(name) for name in FACTORS)
    divisors = model.floats(FREQUENCIES)
    scaling: Config = {}
    if divisors is not None or kind == "longrope" or short is not None:
        trained = own.integer("rope.scaling.original_context_length", own.integer("context_length"))
        scaling = {
            "rope_type": "longrope",
            "short_factor": divisors or short,
            "long_factor": divisors or long,
            "original_max_position_embeddings": trained,
            "attention_factor": own.number("rope.scaling.attn_factor", 1.0),
        }
    elif kind != "none":
        scaling = {"rope_type": kind} | _named(model, _SCALING)
        own.only("rope.scaling.yarn_ext_factor", 1.0)
        own.only("rope.scaling.yarn_attn_factor", 1.0)
        own.only("rope.scaling.attn_factor", 1.0)
    return {"rope_scaling": scaling, "partial_rotary_factor": rotated / head_dim}


_SCALING = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def _llama(model: GgufModel) -> Config:
    """Llama, Mistral, Mixtral and what has their shape: windows are not in the file."""
    if not model.own.integer("expert_count", 0, low=0):
        model.own.only("expert_used_count", 0)
        biased = "blk.0.attn_q.bias" in model.tensors
        mlp_biased = "blk.0.ffn_up.bias" in model.tensors
        return _dense(model, "LlamaForCausalLM", attention_bias=biased, mlp_bias=mlp_biased)
    experts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    return _dense(model, "MixtralForCausalLM", **_named(model, experts))


def _qwen2(model: GgufModel) -> Config:
    return _dense(model, "Qwen2ForCausalLM")


def _qwen3(model: GgufModel) -> Config:
    return _dense(model, "Qwen3ForCausalLM")


def _qwen2_moe(model: GgufModel) -> Config:
    keys = {
        **_EXPERTS,
        "num_experts": "expert_count",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    return _dense(model, "Qwen2MoeForCausalLM", **_named(model, keys), norm_topk_prob=False)


def _qwen3_moe(model: GgufModel) -> Config:
    keys = {**_EXPERTS, "num_experts": "expert_count"}
    return _dense(model, "Qwen3MoeForCausalLM", **_named(model, keys), norm_topk_prob=True)


def _gemma(model: GgufModel) -> Config:
    return _dense(model, "GemmaForCausalLM")


def _gemma2(model: GgufModel) -> Config:
    caps = {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
    }
    return _with_gemma_scale(model, _dense(model, "Gemma2ForCausalLM", **_named(model, caps)), 46)


def _gemma3(model: GgufModel) -> Config:
    keys = {
        "sliding_window": "attention.sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope_local_base_freq": "rope.freq_base_swa",
    }
    config = _dense(model, "Gemma3ForCausalLM", **_named(model, keys))
    return _with_gemma_scale(model, config | _pattern(model), 62)


def _with_gemma_scale(model: GgufModel, config: Config, layers_of_27b: int) -> Config:
    """Scores are scaled by the size of a head, but in the model with 27 billion parameters by a head's share."""
    share = model.own.integer("embedding_length") // model.own.integer("attention.head_count")
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return config | {"query_pre_attn_scalar": share if is_27b else config["head_dim"]}


def _pattern(model: GgufModel) -> Config:
    """Which layers have the window: every so many have none, or a word for each."""
    pattern = model.own.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {} if pattern is None else {"sliding_window_pattern": pattern}
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {"layer_types": [kinds[bool(slides)] for slides in pattern[:MAX_LAYERS]]}


def _phi3(model: GgufModel) -> Config:
    return _dense(model, "Phi3ForCausalLM", **_named(model, {"sliding_window": "attention.sliding_window"}))


def _gpt_oss(model: GgufModel) -> Config:
    keys = {
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "intermediate_size": "expert_feed_forward_length",
        "sliding_window": "attention.sliding_window",
    }
    config = _dense(model, "GptOssForCausalLM", **_named(model, keys))
    if config["rope_scaling"]:
        config["rope_scaling"]["truncate"] = False
    return config


def _granite(model: GgufModel) -> Config:
    return _dense(model, "GraniteForCausalLM", **_named(model, _GRANITE))


def _granite_moe(model: GgufModel) -> Config:
    keys = {
        **_GRANITE,
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    }
    return _dense(model, "GraniteMoeSharedForCausalLM", **_named(model, keys))


def _lfm2(model: GgufModel) -> Config:
    """Layers without heads of keys and values are short convolutions."""
    counts = model.own.numbers("attention.head_count_kv")
    sizes = {key: name for key, name in _SIZES.items() if key != "num_key_value_heads"}
    config = _dense(model, "Lfm2ForCausalLM", sizes, **_named(model, {"conv_L_cache": "shortconv.l_cache"}))
    return config | {
        "num_key_value_heads": int(max(counts, default=0)),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


_GRANITE = {
    "logits_scaling": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
}


ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(_llama, interleaved=True),
    "qwen2": GgufArchitecture(_qwen2),
    "qwen3": GgufArchitecture(_qwen3),
    "qwen2moe": GgufArchitecture(_qwen2_moe),
    "qwen3moe": GgufArchitecture(_qwen3_moe),
    "gemma": GgufArchitecture(_gemma, fields={"norm_offset": 0.0}),
    "gemma2": GgufArchitecture(_gemma2, fields={"norm_offset": 0.0}, places=SANDWICH),
    "gemma3": GgufArchitecture(_gemma3, fields={"norm_offset": 0.0}, places=SANDWICH),
    "phi3": GgufArchitecture(_phi3, merged=True, places={"ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": GgufArchitecture(
        _gpt_oss,
        places={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
    ),
    "lfm2": GgufArchitecture(
        _lfm2,
        places={
            "token_embd_norm": "model.norm",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": Place("conv.conv", new_axis=1),
            "shortconv.out_proj": "conv.out_proj",
        },
    ),
    "granite": GgufArchitecture(_granite, interleaved=True),
    "granitemoe": GgufArchitecture(_granite_moe, interleaved=True),
}
"""By name."""
