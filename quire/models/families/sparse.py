"""Sparse models: decoders whose MLPs are experts, of which a token is seen by a few (arXiv:1701.06538)."""

from __future__ import annotations

from typing import Any

from quire.config.arch import CheckpointNames, ExpertsArch, ModelArch, Routing
from quire.models.families.fields import (
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    declared_windows,
    either,
    read_llama,
    rms_eps,
    uniform_window,
)
from quire.models.json_object import JsonObject

MAX_EXPERTS = 4096

_APART = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


def read_mixtral(architecture: str, config: JsonObject) -> ModelArch:
    """Mixtral (A. Jiang et al., 2024, arXiv:2401.04088): Mistral with experts in every layer."""
    names = CheckpointNames(
        {"mlp": "block_sparse_moe", "down_proj": "w2"}, _APART | {"gate_up_proj": ("w1", "w3")}
    )
    return read_llama(
        architecture,
        config,
        names=names,
        theta=1e6,
        norm_eps=rms_eps(config, 1e-5),
        experts=read_experts(
            config,
            count="num_local_experts",
            size="intermediate_size",
            layers=_all_layers(config),
            routing={"default_top_k": 2, "normalized": True},
        ),
        **uniform_window(config, default=None),
    )


def read_olmoe(architecture: str, config: JsonObject) -> ModelArch:
    """OLMoE (N. Muennighoff et al., 2024, arXiv:2409.02060): norms of all of q and all of k."""
    config.only("clip_qkv")
    experts = read_experts(
        config,
        count="num_experts",
        size="intermediate_size",
        layers=_all_layers(config),
        routing={"default_top_k": 8, "normalized": config.flag("norm_topk_prob", False)},
    )
    return read_llama(
        architecture, config, qk_norm="row_rms", norm_eps=rms_eps(config, 1e-5), experts=experts
    )


def read_qwen2_moe(architecture: str, config: JsonObject) -> ModelArch:
    """Qwen 1.5 and 2 MoE (arXiv:2407.10671): an expert that sees every token, weighted by a gate of its own."""
    windows = {}
    if config.flag("use_sliding_window", False):
        first = config.integer("max_window_layers", 28, low=0)
        windows = declared_windows(config, lambda layer: layer % 2 == 0 and layer < first)
    shared = config.integer("shared_expert_intermediate_size", 5632, high=MAX_WIDTH)
    return read_llama(
        architecture,
        config,
        experts=_qwen_experts(config, default_top_k=4, shared_size=shared, shared_gate=True),
        **biases(qkv=config.flag("qkv_bias", True)),
        **windows,
    )


def read_qwen3_moe(architecture: str, config: JsonObject) -> ModelArch:
    """Qwen 3 MoE (arXiv:2505.09388): q and k are normed per head."""
    slides = config.flag("use_sliding_window", False)
    return read_llama(
        architecture,
        config,
        qk_norm="rms",
        experts=_qwen_experts(config, default_top_k=8),
        **(uniform_window(config, default=4096) if slides else {}),
    )


def read_experts(
    config: JsonObject, *, count: str, size: str, layers: tuple[int, ...], routing: dict[str, Any], **more: Any
) -> ExpertsArch | None:
    """The experts of the layers that have them, by the keys of their number and size; None if none has.

    `routing` has what the family says of it, and `default_top_k`. Experts are gated by SiLU.
    """
    if not layers:
        return None
    config.choice("hidden_act", ("silu",), "silu")
    experts = config.integer(count, high=MAX_EXPERTS)
    top_k = config.integer("num_experts_per_tok", routing.pop("default_top_k"), high=experts)
    return ExpertsArch(
        count=experts,
        intermediate_size=config.integer(size, high=MAX_WIDTH),
        routing=Routing(top_k, **routing),
        layers=layers,
        **more,
    )


def _qwen_experts(config: JsonObject, *, default_top_k: int, **more: Any) -> ExpertsArch | None:
    """In every `decoder_sparse_step`-th layer but those that the file excepts."""
    step = config.integer("decoder_sparse_step", 1)
    excepted = config.numbers("mlp_only_layers") if "mlp_only_layers" in config else ()
    layers = tuple(
        layer for layer in _all_layers(config) if (layer + 1) % step == 0 and layer not in excepted
    )
    normalized = config.flag("norm_topk_prob", False)
    return read_experts(
        either(config, {"num_experts": "num_local_experts"}),
        count="num_experts",
        size="moe_intermediate_size",
        layers=layers,
        routing={"default_top_k": default_top_k, "normalized": normalized},
        **more,
    )


def _all_layers(config: JsonObject) -> tuple[int, ...]:
    return tuple(range(config.integer("num_hidden_layers", high=MAX_LAYERS)))
