# SPDX-License-Identifier: Apache-2.0
"""GGUF architectures with Mamba, short convolutions or delta rules in some or all layers; see `architectures`.

Invariant: torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import (
    AROUND,
    EXPERTS,
    MULTIPLIERS,
    SIZES,
    Config,
    TensorPlace,
    TensorPlaces,
    dense,
    multiplied,
    named,
    num_mtp_layers,
)
from quire.models.gguf.sparse import BALANCED, SIGMOID, deepseek_experts

_SIZES = {key: name for key, name in SIZES.items() if key != "num_key_value_heads"}

CONV_PLACES: TensorPlaces = {
    "token_embd_norm": "model.norm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": TensorPlace("conv.conv", new_axis=1),
    "shortconv.out_proj": "conv.out_proj",
}


def _state_places(mixer: str) -> TensorPlaces:
    """Return Mamba 2's places; its vectors have extra dimensions in GGUF."""
    return {
        "ssm_in": f"{mixer}.in_proj",
        "ssm_conv1d.weight": TensorPlace(f"{mixer}.conv1d.weight", new_axis=1),
        "ssm_conv1d.bias": f"{mixer}.conv1d.bias",
        "ssm_dt.bias": f"{mixer}.scan.dt_bias",
        "ssm_a": TensorPlace(f"{mixer}.scan.A_log", flat=True, made_by="negative_exp"),
        "ssm_d": TensorPlace(f"{mixer}.scan.D", flat=True),
        "ssm_norm": TensorPlace(f"{mixer}.gated_norm", flat=True),
        "ssm_out": f"{mixer}.out_proj",
    }


STATE_PLACES = _state_places("mamba")
PARALLEL_PLACES: TensorPlaces = {
    **_state_places("mixers.mamba"),
    "attn_q": "mixers.self_attn.q_proj",
    "attn_k": "mixers.self_attn.k_proj",
    "attn_v": "mixers.self_attn.v_proj",
    "attn_output": "mixers.self_attn.o_proj",
}


DELTA_PLACES: TensorPlaces = {
    **AROUND,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d.weight": TensorPlace("linear_attn.conv1d.weight", new_axis=1),
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": TensorPlace("linear_attn.A_log", made_by="negative_exp"),
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA_APART: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj", "q_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z"),
}
"""Queries are merged with gates; q, k and v of delta layers are concatenated."""
DELTA_STEPS_APART: Mapping[str, tuple[str, ...]] = {"in_proj_ba": ("in_proj_b", "in_proj_a")}


def lfm2(model: GgufModel) -> Config:
    """LFM2; layers without key-value heads are short convolutions."""
    config = dense(model, "Lfm2ForCausalLM", _SIZES, **named(model, {"conv_L_cache": "shortconv.l_cache"}))
    return config | {
        **_kinds(model, "conv"),
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(model: GgufModel) -> Config:
    """LFM2 with experts after the first layers."""
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
    """Granite 4: layers without key-value heads are Mamba 2; attention has no positions."""
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
    """Falcon-H1: its many multipliers are folded into the weights; an optional norm follows the gate."""
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
    """Qwen3-Next; some layers may have no experts."""
    layers = range(model.own.integer("block_count") - num_mtp_layers(model))
    dense_layers = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in model.tensors]
    return _delta(model, "Qwen3NextForCausalLM") | _delta_experts(model) | {"mlp_only_layers": dense_layers}


def qwen3_5(model: GgufModel) -> Config:
    """Qwen 3.5, text: a token's three positions, each rotating a part, are equal."""
    model.own.get("rope.dimension_sections")
    return _delta(model, "Qwen3_5ForCausalLM")


def qwen3_5_moe(model: GgufModel) -> Config:
    """Sparse Qwen 3.5."""
    return qwen3_5(model) | _delta_experts(model) | {"architectures": ["Qwen3_5MoeForCausalLM"]}


def _delta_experts(model: GgufModel) -> Config:
    keys = {
        **EXPERTS,
        "num_experts": "expert_count",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    return named(model, keys) | {"norm_topk_prob": True}


def _delta(model: GgufModel, architecture: str) -> Config:
    """Gated DeltaNet in most layers; its sizes have Mamba's key names."""
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
    """Return layer kinds from their numbers of key-value heads."""
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


CHANNEL_PLACES: TensorPlaces = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d.weight": TensorPlace("mamba.conv1d.weight", new_axis=1),
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_a": TensorPlace("mamba.scan.A_log", made_by="negative_exp"),
    "ssm_d": "mamba.scan.D",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_out": "mamba.out_proj",
}
NEMOTRON_PLACES: TensorPlaces = {
    **STATE_PLACES,
    **BALANCED,
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
}
_MAMBAS_SIZES = {key: name for key, name in SIZES.items() if key in ("hidden_size", "num_hidden_layers")}
_STATES = {"state_size": "ssm.state_size", "conv_kernel": "ssm.conv_kernel"}
_JAMBA_STATES = {
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_dt_rank": "ssm.time_step_rank",
}


def mamba(model: GgufModel) -> Config:
    """Mamba, and Falcon Mamba, which norms dt, b and c."""
    keys = {"intermediate_size": "ssm.inner_size", "time_step_rank": "ssm.time_step_rank"}
    name = "FalconMambaForCausalLM" if model.own.flag("ssm.dt_b_c_rms", False) else "MambaForCausalLM"
    return _mixers(model, name) | named(model, keys)


def mamba2(model: GgufModel) -> Config:
    return _mixers(model, "Mamba2ForCausalLM") | _heads(model, "num_heads", "head_dim")


def jamba(model: GgufModel) -> Config:
    """Jamba; attention and expert layers are converted to a period and an offset."""
    own = model.own
    counts = own.numbers("attention.head_count_kv")
    hidden, inner = own.integer("embedding_length"), own.integer("ssm.inner_size")
    if inner % hidden:
        raise own.wrong("ssm.inner_size", f"a multiple of embedding_length ({hidden})")
    attends = [layer for layer, count in enumerate(counts) if count]
    sparse = [layer for layer in range(len(counts)) if f"blk.{layer}.ffn_gate_inp.weight" in model.tensors]
    sizes = {key: name for key, name in SIZES.items() if key != "num_key_value_heads"}
    keys = {**_JAMBA_STATES, "num_experts_per_tok": "expert_used_count"}
    own.get("expert_count")
    config = dense(model, "JambaForCausalLM", sizes, **named(model, keys))
    return config | {
        "num_key_value_heads": int(max(counts, default=0)),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in model.tensors,
        "num_experts": own.integer("expert_count") if sparse else 1,
        **_in_turn(model, "attn_layer", attends, len(counts)),
        **_in_turn(model, "expert_layer", sparse, len(counts)),
    }


def nemotron_h(model: GgufModel) -> Config:
    """Nemotron-H: layers with key-value heads attend, those with an MLP size are MLPs, the others Mamba 2."""
    own = model.own
    own.only("rope.scaling.finetuned", False)
    own.only("expert_gating_func", SIGMOID)
    counts = own.numbers("attention.head_count_kv")
    own.get("feed_forward_length")  # a number for each layer; files of sparse models lack some
    kinds = [_nemotron_kind(model, layer, count) for layer, count in enumerate(counts)]
    skipped = ("num_key_value_heads", "intermediate_size", "rms_norm_eps")
    sizes = {key: name for key, name in SIZES.items() if key not in skipped}
    more = {
        "ssm_state_size": "ssm.state_size",
        "conv_kernel": "ssm.conv_kernel",
        "n_groups": "ssm.group_count",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
        "moe_latent_size": "moe_latent_size",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    experts = deepseek_experts(model) if "moe" in kinds else {}
    config = dense(model, "NemotronHForCausalLM", sizes, **experts, **named(model, more))
    widths = {entry.shape[0] for name, (_, entry) in model.tensors.items() if name.endswith(".ffn_up.weight")}
    return config | {
        **_heads(model, "mamba_num_heads", "mamba_head_dim"),
        "layers_block_type": kinds,
        "num_key_value_heads": int(max(counts, default=0)),
        "intermediate_size": max(widths, default=1),
        "use_conv_bias": _has(model, "ssm_conv1d.bias"),
    }


def _nemotron_kind(model: GgufModel, layer: int, num_kv_heads: float) -> str:
    if f"blk.{layer}.ffn_gate_inp.weight" in model.tensors:
        return "moe"
    if num_kv_heads:
        return "attention"
    return "mlp" if f"blk.{layer}.ffn_up.weight" in model.tensors else "mamba"


def _mixers(model: GgufModel, architecture: str) -> Config:
    """Return the config of models without attention and MLPs."""
    for key in ("feed_forward_length", "attention.head_count"):
        model.own.only(key, 0)
    eps = {"layer_norm_epsilon": "attention.layer_norm_rms_epsilon"}
    return named(model, {**_MAMBAS_SIZES, **_STATES, **eps}) | {
        "architectures": [architecture],
        "max_position_embeddings": model.own.integer("context_length"),
        "use_conv_bias": _has(model, "ssm_conv1d.bias"),
        "use_bias": _has(model, "ssm_in.bias"),
    }


def _heads(model: GgufModel, count: str, size: str) -> Config:
    """Return the heads of Mamba 2 under a family's keys."""
    heads, width = model.own.integer("ssm.time_step_rank"), model.own.integer("ssm.inner_size")
    if width % heads:
        raise model.own.wrong(
            "ssm.inner_size", f"a multiple of ssm.time_step_rank, the number of heads ({heads})"
        )
    return {count: heads, size: width // heads, **named(model, {"n_groups": "ssm.group_count"})}


def _has(model: GgufModel, ending: str) -> bool:
    return any(name.endswith(f".{ending}") for name in model.tensors)


def _in_turn(model: GgufModel, key: str, layers: list[int], count: int) -> Config:
    """Return the period and offset of these layers; a period beyond all layers if there are fewer than two."""
    period = layers[1] - layers[0] if len(layers) > 1 else count + 1
    offset = layers[0] if layers else count
    if layers != list(range(offset, count, period)):
        model.own.refuse("block_count", f"of layers that come in turn ({key}: {layers})")
    return {f"{key}_period": period, f"{key}_offset": offset}
