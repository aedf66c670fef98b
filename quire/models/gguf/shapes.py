# SPDX-License-Identifier: Apache-2.0
"""Shared parts of GGUF architectures: sizes, rope, and tensor names with their places in our module tree.

Invariant: torch-free. Architectures share most names, so only differences from `SHARED` are listed with each; see
`architectures`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.models.families.fields import MAX_LAYERS
from quire.models.gguf.model import GgufModel


@dataclass(frozen=True)
class TensorPlace:
    """Destination of a tensor that differs from the family's own files."""

    name: str
    flat: bool = False
    """True if GGUF has several dimensions and the family one."""
    new_axis: int | None = None
    """Dimension of size 1 that GGUF omits, inserted after flattening."""
    rows: bool = False
    """True if GGUF has a matrix per head, and the family all their rows in one."""
    made_by: str | None = None
    """Transformation that the converter applied to the numbers; a key of `tensors.INVERSES`."""
    apart: bool = False
    """True if GGUF stacks what the family has in several tensors, whose numbers replace `{}` in the name."""

    @property
    def module(self) -> str:
        """Regular expression of the family's module names for the tensor."""
        name = re.escape(self.name.removesuffix(".weight"))
        return name.replace(re.escape("{}"), r"\d+") if self.apart else name

    def member(self, number: int) -> TensorPlace:
        """Return the place of one member of a stacked tensor."""
        return replace(self, name=self.name.format(number), apart=False)


TensorPlaces = Mapping[str, str | TensorPlace]
Listed = Mapping[str, tuple[str, tuple[int, ...]]]
"""Metadata key with a number per layer -> (parameter name without its layer, shape)."""

SHARED: TensorPlaces = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": TensorPlace("mlp.shared_expert_gate", flat=True, new_axis=0),
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Tensor name without layer and ".weight" or ".bias" -> module name without layer."""

SANDWICH: TensorPlaces = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Places in blocks with norms around attention and around the MLP."""

AROUND: TensorPlaces = {"post_attention_norm": "post_attention_layernorm"}
"""Places in blocks whose pre-MLP norm has the name of a post-attention norm."""
MERGED_MLP: TensorPlaces = {"ffn_up": "mlp.gate_up_proj"}

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_PARAMETER = re.compile(r"(.+)(\.weight|\.bias)")


def place_of(name: str, own: TensorPlaces) -> TensorPlace:
    """Return a tensor's place, by the architecture's own places, then the shared ones; else its own name."""
    match = _LAYER.fullmatch(name)
    around, inner = (f"model.layers.{match[1]}.", match[2]) if match else ("", name)
    parameter = _PARAMETER.fullmatch(inner)
    module, suffix = (parameter[1], parameter[2]) if parameter else (inner, "")
    for key, ending in ((inner, ""), (module, suffix)):
        found = own.get(key, SHARED.get(key))
        if found is not None:
            place = TensorPlace(found) if isinstance(found, str) else found
            return replace(place, name=around + place.name + ending)
    return TensorPlace(name)


FREQUENCIES = "rope_freqs.weight"
"""Divisors of rotary frequencies: Llama 3's scaling, precomputed by the converter."""
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
"""Granite's multipliers; logits are divided by theirs."""


_NONE_IF_ZERO = (
    "attention.sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.clamp_kqv",
)
_ABSENT_IF_ZERO = ("logit_scale", "embedding_scale", "residual_scale", "rope.scaling.original_context_length")
"""Keys that 0 disables as null does in config.json, and keys for which 0 means absent."""


def named(model: GgufModel, keys: Mapping[str, str]) -> Config:
    """Return config.json keys from the architecture's keys; a per-layer list counts as one number if all agree."""
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
    """Set Granite's attention scale; 0 means the usual one."""
    if model.own.get("attention.scale") == 0:
        config["attention_multiplier"] = config["head_dim"] ** -0.5
    return config


def biased(model: GgufModel, tensor: str) -> bool:
    """Return whether a layer of the first block has a bias."""
    return f"blk.0.{tensor}.bias" in model.tensors


def windows(model: GgufModel) -> Config:
    """Return the window, and the layers that have it, from a period or a list."""
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


def num_mtp_layers(model: GgufModel) -> int:
    """Return the number of MTP blocks, which are last and skipped."""
    return model.own.integer("nextn_predict_layers", 0, low=0)


def dense(model: GgufModel, architecture: str, sizes: Mapping[str, str] = SIZES, **more: Any) -> Config:
    """Return the common keys: sizes and the rotary embedding."""
    config = named(model, sizes) | {"architectures": [architecture]}
    share = model.own.integer("embedding_length") // model.own.integer("attention.head_count")
    config["head_dim"] = model.own.integer("attention.key_length", share)
    config["num_hidden_layers"] = model.own.integer("block_count") - num_mtp_layers(model)
    model.own.only("attention.value_length", config["head_dim"])
    return config | rotary(model, config["head_dim"]) | more


def rotary(model: GgufModel, head_dim: int) -> Config:
    """Return the rotary embedding for this head size."""
    own = model.own
    rotated = own.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    old_factor = own.number("rope.scale_linear", 0.0)
    factor = own.number("rope.scaling.factor", old_factor) or 1.0  # 0 means unset
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
