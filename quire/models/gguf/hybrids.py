"""Architectures of which layers, or parts of them, keep a state; see `architectures`.

Invariant: torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import (
    EXPERTS,
    MULTIPLIERS,
    SIZES,
    Config,
    dense,
    multiplied,
    named,
    num_guessing,
)
from quire.models.gguf.sparse import SIGMOID
from quire.models.gguf.tensor_names import AROUND, Place, Places

_SIZES = {key: name for key, name in SIZES.items() if key != "num_key_value_heads"}

CONV_PLACES: Places = {
    "token_embd_norm": "model.norm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": Place("conv.conv", new_axis=1),
    "shortconv.out_proj": "conv.out_proj",
}


def _state_places(mixer: str) -> Places:
    """Of Mamba 2, whose vectors have more dimensions in such files than they need."""
    return {
        "ssm_in": f"{mixer}.in_proj",
        "ssm_conv1d.weight": Place(f"{mixer}.conv1d.weight", new_axis=1),
        "ssm_conv1d.bias": f"{mixer}.conv1d.bias",
        "ssm_dt.bias": f"{mixer}.scan.dt_bias",
        "ssm_a": Place(f"{mixer}.scan.A_log", flat=True, made_by="negative_exp"),
        "ssm_d": Place(f"{mixer}.scan.D", flat=True),
        "ssm_norm": Place(f"{mixer}.gated_norm", flat=True),
        "ssm_out": f"{mixer}.out_proj",
    }


STATE_PLACES = _state_places("mamba")
PARALLEL_PLACES: Places = {
    **_state_places("mixers.mamba"),
    "attn_q": "mixers.self_attn.q_proj",
    "attn_k": "mixers.self_attn.k_proj",
    "attn_v": "mixers.self_attn.v_proj",
    "attn_output": "mixers.self_attn.o_proj",
}


DELTA_PLACES: Places = {
    **AROUND,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d.weight": Place("linear_attn.conv1d.weight", new_axis=1),
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": Place("linear_attn.A_log", made_by="negative_exp"),
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA_APART: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj", "q_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z"),
}
"""Queries come with gates; queries, keys and values of layers with states stand one behind the other."""
DELTA_STEPS_APART: Mapping[str, tuple[str, ...]] = {"in_proj_ba": ("in_proj_b", "in_proj_a")}


def lfm2(model: GgufModel) -> Config:
    """Layers without heads of keys and values are short convolutions."""
    config = dense(model, "Lfm2ForCausalLM", _SIZES, **named(model, {"conv_L_cache": "shortconv.l_cache"}))
    return config | {
        **_kinds(model, "conv"),
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(model: GgufModel) -> Config:
    """LFM2 with experts behind the first layers."""
    model.own.only("expert_gating_func", SIGMOID)
    keys = {**EXPERTS, "num_experts": "expert_count", "num_dense_layers": "leading_dense_block_count"}
    biased = any(name.endswith(".exp_probs_b.bias") for name in model.tensors)
    return lfm2(model) | {
        "architectures": ["Lfm2MoeForCausalLM"],
        **named(model, keys),
        "norm_topk_prob": True,
        "use_expert_bias": biased,
    }


def granite_hybrid(model: GgufModel) -> Config:
    """Granite 4: layers without heads of keys and values are Mamba 2's; those that attend know no positions."""
    own, kinds = model.own, _kinds(model, "mamba")
    if own.flag("rope.scaling.finetuned", True):
        own.refuse("rope.scaling.finetuned", "false, as in Granite 4: queries and keys are not rotated")
    keys = {
        **MULTIPLIERS,
        "num_experts_per_tok": "expert_used_count",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    }
    config = multiplied(model, dense(model, "GraniteMoeHybridForCausalLM", _SIZES, **named(model, keys)))
    config.setdefault("shared_intermediate_size", config.get("intermediate_size"))
    return config | kinds | _mamba2(model) | {"num_local_experts": own.integer("expert_count", 0, low=0)}


def falcon_h1(model: GgufModel) -> Config:
    """Falcon-H1: its many multipliers are in the weights; where a mixer has a norm, that is behind the gate."""
    return dense(
        model,
        "FalconH1ForCausalLM",
        **_mamba2(model),
        mamba_d_ssm=model.own.integer("ssm.inner_size"),
        mamba_rms_norm="blk.0.ssm_norm.weight" in model.tensors,
        mamba_norm_before_gate=False,
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        mlp_bias="blk.0.ffn_up.bias" in model.tensors,
    )


def qwen3_next(model: GgufModel) -> Config:
    """Qwen3-Next, of which some layers may have no experts."""
    layers = range(model.own.integer("block_count") - num_guessing(model))
    dense_layers = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in model.tensors]
    return _delta(model, "Qwen3NextForCausalLM") | _delta_experts(model) | {"mlp_only_layers": dense_layers}


def qwen3_5(model: GgufModel) -> Config:
    """Qwen 3.5, text: of the three positions of a token, each of which turns a part of it, all are the same."""
    model.own.get("rope.dimension_sections")
    return _delta(model, "Qwen3_5ForCausalLM")


def qwen3_5_moe(model: GgufModel) -> Config:
    """Its sparse form."""
    return qwen3_5(model) | _delta_experts(model) | {"architectures": ["Qwen3_5MoeForCausalLM"]}


def _delta_experts(model: GgufModel) -> Config:
    keys = {
        **EXPERTS,
        "num_experts": "expert_count",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    return named(model, keys) | {"norm_topk_prob": True}


def _delta(model: GgufModel, architecture: str) -> Config:
    """In most layers heads have matrices as states, whose sizes have the names of Mamba's."""
    own = model.own
    heads, width = own.integer("ssm.time_step_rank"), own.integer("ssm.inner_size")
    if width % heads:
        raise own.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank, the number of heads ({heads})")
    keys = {
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "full_attention_interval": "full_attention_interval",
    }
    config = dense(model, architecture, **named(model, keys))
    states = own.get("attention.recurrent_layers")
    if isinstance(states, list):
        kinds = {True: "linear_attention", False: "full_attention"}
        config["layer_types"] = [kinds[bool(keeps)] for keeps in states[: config["num_hidden_layers"]]]
    return config | {"linear_num_value_heads": heads, "linear_value_head_dim": width // heads}


def _kinds(model: GgufModel, without_heads: str) -> Config:
    """What layers are by their numbers of heads of keys and values."""
    counts = model.own.numbers("attention.head_count_kv")
    return {
        "num_key_value_heads": int(max(counts, default=0)),
        "layer_types": ["full_attention" if count else without_heads for count in counts],
    }


def _mamba2(model: GgufModel) -> Config:
    own = model.own
    heads, width = own.integer("ssm.time_step_rank"), own.integer("ssm.inner_size")
    if width % heads:
        raise own.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank, the number of heads ({heads})")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_n_groups": own.integer("ssm.group_count"),
        "mamba_d_state": own.integer("ssm.state_size"),
        "mamba_d_conv": own.integer("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in model.tensors),
    }
