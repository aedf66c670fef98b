"""The text model of Llama 4 (Meta, 2025)."""

from __future__ import annotations

from typing import Any

from quire.config.arch import CheckpointNames, ExpertsArch, ExpertStack, ModelArch, Temperature
from quire.models.families.experts import all_layers, read_experts
from quire.models.families.fields import (
    MAX_WIDTH,
    biases,
    read_head_dim,
    read_llama,
    rms_eps,
    unrotated_layers,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import CHUNKED, FULL, read_rope

_NAMES = CheckpointNames({"mlp": "feed_forward", "gate": "router"})
_STACK = ExpertStack(("gate_up_proj", "down_proj"), gate_up="gate_up_proj", weight="")


def read_llama4(architecture: str, config: JsonObject) -> ModelArch:
    """Attention within chunks, but for every fourth layer, which knows no positions; an expert beside a shared one."""
    heads = config.integer("num_attention_heads")
    head_dim, unrotated = read_head_dim(config, heads, 128), unrotated_layers(config)
    attention_bias = config.flag("attention_bias", False)
    return read_llama(
        architecture,
        config,
        names=_NAMES,
        intermediate_size=config.integer("intermediate_size_mlp", 16384, high=MAX_WIDTH),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, theta=5e5, interleaved=True),
        unrotated_layers=unrotated,
        # A norm that weighs nothing is the same before and behind the rotation.
        qk_norm="unweighted_rms" if config.flag("use_qk_norm", True) else None,
        unnormed_layers=unrotated,
        temperature=_temperature(config),
        norm_eps=rms_eps(config, 1e-5),
        experts=_experts(config),
        **biases(qkv=attention_bias, out=attention_bias),
        **_chunks(config, unrotated),
    )


def _temperature(config: JsonObject) -> Temperature | None:
    # Published files have a number here.
    if config.get("attn_temperature_tuning") in (False, 0):
        return None
    interval = config.number("floor_scale", 8192, low=1.0)
    return Temperature(interval, config.number("attn_scale", 0.1), offset=1.0)


def _chunks(config: JsonObject, unrotated: tuple[int, ...]) -> dict[str, Any]:
    """Chunks on the layers that the file names, else on those that know positions."""
    size = (
        8192
        if "attention_chunk_size" not in config.values
        else config.optional_integer("attention_chunk_size")
    )
    layers = all_layers(config)
    types = tuple(FULL if layer in unrotated else CHUNKED for layer in layers)
    if "layer_types" in config:
        types = config.texts("layer_types")
        if len(types) != len(layers) or not set(types) <= {FULL, CHUNKED}:
            raise config.wrong("layer_types", f"num_hidden_layers times {FULL} or {CHUNKED}")
    return {} if size is None else {"layer_types": types, "attention_chunk": size}


def _experts(config: JsonObject) -> ExpertsArch | None:
    config.only("num_experts_per_tok", 1)
    step = config.integer("interleave_moe_layer_step", 1)
    layers = all_layers(config)[step - 1 :: step]
    if "moe_layers" in config:
        layers = tuple(int(layer) for layer in config.numbers("moe_layers"))
    return read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=layers,
        routing={"default_top_k": 1, "scores": "sigmoid"},
        stack=_STACK,
        weighs_input=True,
        shared_size=config.integer("intermediate_size", high=MAX_WIDTH),
    )
