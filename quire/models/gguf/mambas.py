"""Mamba, and architectures of which most layers are Mamba's; see `architectures`.

Invariant: torch-free.
"""

from __future__ import annotations

from quire.models.gguf.hybrids import STATE_PLACES
from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import SIZES, Config, dense, named
from quire.models.gguf.sparse import BALANCED, SIGMOID, deepseek_experts
from quire.models.gguf.tensor_names import Place, Places

CHANNEL_PLACES: Places = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d.weight": Place("mamba.conv1d.weight", new_axis=1),
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_a": Place("mamba.scan.A_log", made_by="negative_exp"),
    "ssm_d": "mamba.scan.D",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_out": "mamba.out_proj",
}
NEMOTRON_PLACES: Places = {
    **STATE_PLACES,
    **BALANCED,
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
}
_SIZES = {key: name for key, name in SIZES.items() if key in ("hidden_size", "num_hidden_layers")}
_STATES = {"state_size": "ssm.state_size", "conv_kernel": "ssm.conv_kernel"}
_JAMBA_STATES = {
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_dt_rank": "ssm.time_step_rank",
}


def mamba(model: GgufModel) -> Config:
    """Mamba, and Falcon Mamba, which norms what chooses a step."""
    keys = {"intermediate_size": "ssm.inner_size", "time_step_rank": "ssm.time_step_rank"}
    name = "FalconMambaForCausalLM" if model.own.flag("ssm.dt_b_c_rms", False) else "MambaForCausalLM"
    return _mixers(model, name) | named(model, keys)


def mamba2(model: GgufModel) -> Config:
    return _mixers(model, "Mamba2ForCausalLM") | _heads(model, "num_heads", "head_dim")


def jamba(model: GgufModel) -> Config:
    """Which layers attend, and which have experts, its readers want as a period and an offset."""
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
    """Layers with heads of keys and values attend, those with an MLP's size have one, and the others keep states."""
    own = model.own
    own.only("rope.scaling.finetuned", False)
    own.only("expert_gating_func", SIGMOID)
    counts = own.numbers("attention.head_count_kv")
    own.get("feed_forward_length")  # a number for each layer, of which files of sparse models lack some
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
    """Of models without attention and MLPs."""
    for key in ("feed_forward_length", "attention.head_count"):
        model.own.only(key, 0)
    eps = {"layer_norm_epsilon": "attention.layer_norm_rms_epsilon"}
    return named(model, {**_SIZES, **_STATES, **eps}) | {
        "architectures": [architecture],
        "max_position_embeddings": model.own.integer("context_length"),
        "use_conv_bias": _has(model, "ssm_conv1d.bias"),
        "use_bias": _has(model, "ssm_in.bias"),
    }


def _heads(model: GgufModel, count: str, size: str) -> Config:
    """Of Mamba 2, under a family's keys."""
    heads, width = model.own.integer("ssm.time_step_rank"), model.own.integer("ssm.inner_size")
    if width % heads:
        raise model.own.wrong(
            "ssm.inner_size", f"a multiple of ssm.time_step_rank, the number of heads ({heads})"
        )
    return {count: heads, size: width // heads, **named(model, {"n_groups": "ssm.group_count"})}


def _has(model: GgufModel, ending: str) -> bool:
    return any(name.endswith(f".{ending}") for name in model.tensors)


def _in_turn(model: GgufModel, key: str, layers: list[int], count: int) -> Config:
    """The period and the offset of these layers; a period beyond all layers if there are none, or one."""
    period = layers[1] - layers[0] if len(layers) > 1 else count + 1
    offset = layers[0] if layers else count
    if layers != list(range(offset, count, period)):
        model.own.refuse("block_count", f"of layers that come in turn ({key}: {layers})")
    return {f"{key}_period": period, f"{key}_offset": offset}
