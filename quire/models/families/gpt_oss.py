"""gpt-oss (OpenAI, 2025, arXiv:2508.10925)."""

from __future__ import annotations

from dataclasses import replace

from quire.config.arch import CheckpointNames, ExpertStack, ModelArch
from quire.models.families.experts import all_layers, read_experts
from quire.models.families.fields import alternating_window, biases, read_llama, rms_eps
from quire.models.json_object import JsonObject

_STACK = ExpertStack(gate_up="gate_up_proj", interleaved=True, weight="", bias="_bias")


def read_gpt_oss(architecture: str, config: JsonObject) -> ModelArch:
    """Sinks, a window on every other layer, biases everywhere, and a SwiGLU of its own."""
    config.only("swiglu_alpha", 1.702)
    config.only("swiglu_limit", 7.0)
    experts = read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=all_layers(config),
        # A softmax over the chosen is one over all, divided by its sum over the chosen.
        routing={"default_top_k": 4, "normalized": True},
        stack=_stack(config),
        activation="clamped_swiglu",
        alternates=True,
        bias=True,
        router_bias=True,
    )
    has_biases = config.flag("attention_bias", True)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"gate": "router"}),
        default_head_dim=64,
        theta=150000.0,
        norm_eps=rms_eps(config, 1e-5),
        attention_sinks=True,
        experts=experts,
        **biases(qkv=has_biases, out=has_biases),
        **alternating_window(config, period=2, default=128),
    )


def _stack(config: JsonObject) -> ExpertStack:
    """As OpenAI publishes them, experts are in MXFP4; once they are floats they are also transposed."""
    if config.child("quantization_config").get("quant_method") == "mxfp4":
        return _STACK
    return replace(_STACK, transposed=("gate_up_proj", "down_proj"))
