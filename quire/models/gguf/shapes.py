"""What the files of most architectures say alike: sizes and the rotary embedding.

Invariant: torch-free; see `architectures`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.families.fields import MAX_LAYERS
from quire.models.gguf.model import GgufModel

FREQUENCIES = "rope_freqs.weight"
"""What rotary frequencies are divided by: Llama 3's scaling, computed when the file was made."""
FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
Config = dict[str, Any]

SIZES = {
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
EXPERTS = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
MULTIPLIERS = {
    "logits_scaling": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
}
"""Of Granite, in which the logits' is what they are divided by."""


_NONE_IF_ZERO = (
    "attention.sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.clamp_kqv",
)
_ABSENT_IF_ZERO = ("logit_scale", "embedding_scale", "residual_scale", "rope.scaling.original_context_length")
"""Keys that 0 switches off as null does in config.json, and keys that 0 says nothing of."""


def named(model: GgufModel, keys: Mapping[str, str]) -> Config:
    """Keys of config.json by the architecture's; a list, with a number for each layer, stands for one if all agree."""
    values = {name: model.own.get(key) for name, key in keys.items() if key in model.own}
    zero = {keys[name] for name, value in values.items() if value == 0 and not isinstance(value, bool)}
    values = {name: value for name, value in values.items() if keys[name] not in zero & {*_ABSENT_IF_ZERO}}
    values |= {name: None for name in values if keys[name] in zero & {*_NONE_IF_ZERO}}
    for name, value in values.items():
        if isinstance(value, list):
            if len(set(value)) != 1:
                model.own.refuse(keys[name], "the same in all layers")
            values[name] = value[0]
    return values


def multiplied(model: GgufModel, config: Config) -> Config:
    """Granite's scale of attention, which 0 makes the usual one."""
    if model.own.get("attention.scale") == 0:
        config["attention_multiplier"] = config["head_dim"] ** -0.5
    return config


def biased(model: GgufModel, tensor: str) -> bool:
    """Whether a layer of the first block has a bias."""
    return f"blk.0.{tensor}.bias" in model.tensors


def windows(model: GgufModel) -> Config:
    """The window, and which layers have it: every so many have none, or a word for each."""
    config = named(model, {"sliding_window": "attention.sliding_window"})
    pattern = model.own.get("attention.sliding_window_pattern")
    if config.get("sliding_window", 0) is None:
        return config | {
            "layer_types": ["full_attention"] * model.own.integer("block_count", high=MAX_LAYERS)
        }
    if not isinstance(pattern, list):
        return config if pattern is None else config | {"sliding_window_pattern": pattern}
    kinds = {True: "sliding_attention", False: "full_attention"}
    return config | {"layer_types": [kinds[bool(slides)] for slides in pattern[:MAX_LAYERS]]}


def num_guessing(model: GgufModel) -> int:
    """How many of the blocks guess ahead: the last ones, which are left out."""
    return model.own.integer("nextn_predict_layers", 0, low=0)


def dense(model: GgufModel, architecture: str, sizes: Mapping[str, str] = SIZES, **more: Any) -> Config:
    """What all have: sizes and the rotary embedding."""
    config = named(model, sizes) | {"architectures": [architecture]}
    share = model.own.integer("embedding_length") // model.own.integer("attention.head_count")
    config["head_dim"] = model.own.integer("attention.key_length", share)
    config["num_hidden_layers"] = model.own.integer("block_count") - num_guessing(model)
    model.own.only("attention.value_length", config["head_dim"])
    return config | rotary(model, config["head_dim"]) | more


def rotary(model: GgufModel, head_dim: int) -> Config:
    """The rotary embedding of heads of this size."""
    own = model.own
    rotated = own.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    old_factor = own.number("rope.scale_linear", 0.0)
    factor = own.number("rope.scaling.factor", old_factor) or 1.0  # 0 says nothing
    default = "none" if factor == 1.0 else "linear"
    kind = own.choice("rope.scaling.type", ("none", "linear", "yarn", "longrope"), default)
    short, long = (model.floats(name) for name in FACTORS)
    divisors = model.floats(FREQUENCIES)
    scaling: Config = {}
    if divisors is not None or kind == "longrope" or short is not None:
        trained = own.integer("rope.scaling.original_context_length", 0, low=0) or own.integer(
            "context_length"
        )
        scaling = {
            "rope_type": "longrope",
            "short_factor": divisors or short,
            "long_factor": divisors or long,
            "original_max_position_embeddings": trained,
            "attention_factor": own.number("rope.scaling.attn_factor", 1.0),
        }
    elif kind == "none":  # whatever the factor is
        own.get("rope.scaling.original_context_length")
    else:
        scaling = {"rope_type": kind, "factor": factor} | named(model, _SCALING)
        own.only("rope.scaling.yarn_ext_factor", 1.0)
        own.only("rope.scaling.yarn_attn_factor", 1.0)
        own.only("rope.scaling.attn_factor", 1.0)
    return {"rope_scaling": scaling, "partial_rotary_factor": rotated / head_dim}


_SCALING = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
