"""Sparse models: decoders whose MLPs are experts, of which a token is seen by a few (arXiv:1701.06538)."""

from __future__ import annotations

from quire.config.arch import QKV_APART, CheckpointNames, ModelArch
from quire.models.families.experts import all_layers, read_experts, read_qwen_experts
from quire.models.families.fields import (
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    declared_windows,
    either,
    read_head_dim,
    read_llama,
    rms_eps,
    uniform_window,
)
from quire.models.families.hunyuan import read_hunyuan
from quire.models.families.llama import read_ernie
from quire.models.families.olmo import read_olmo2
from quire.models.json_object import JsonObject

MIXTRAL_NAMES = CheckpointNames(
    {"mlp": "block_sparse_moe", "down_proj": "w2"}, {**QKV_APART, "gate_up_proj": ("w1", "w3")}
)
_SHARED_EXPERTS = {"shared_expert": "shared_experts"}


def read_mixtral(architecture: str, config: JsonObject) -> ModelArch:
    """Mixtral (A. Jiang et al., 2024, arXiv:2401.04088): Mistral with experts in every layer."""
    return read_llama(
        architecture,
        config,
        names=MIXTRAL_NAMES,
        theta=1e6,
        norm_eps=rms_eps(config, 1e-5),
        experts=read_experts(
            config,
            count="num_local_experts",
            size="intermediate_size",
            layers=all_layers(config),
            routing={"default_top_k": 2, "normalized": True},
        ),
        **uniform_window(config, default=None),
    )


def read_arctic(architecture: str, config: JsonObject) -> ModelArch:
    """Arctic (Snowflake, 2024): a small dense MLP in every layer, and experts beside it and attention."""
    config.only("moe_layer_frequency", 1)
    config.only("use_residual", True)
    config.only("parallel_attn_mlp_res", True)
    top_k = config.integer("num_experts_per_tok", 1)
    experts = read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=all_layers(config),
        routing={"default_top_k": 1, "normalized": top_k > 1},
    )
    return read_llama(
        architecture,
        config,
        names=MIXTRAL_NAMES,
        block="residual_experts",
        intermediate_size=config.integer("hidden_size", high=MAX_WIDTH),
        norm_eps=rms_eps(config, 1e-5),
        experts=experts,
        **uniform_window(config, default=None),
    )


def read_olmoe(architecture: str, config: JsonObject) -> ModelArch:
    """OLMoE (N. Muennighoff et al., 2024, arXiv:2409.02060): norms of all of q and all of k."""
    config.only("clip_qkv")
    experts = read_experts(
        config,
        count="num_experts",
        size="intermediate_size",
        layers=all_layers(config),
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
        experts=read_qwen_experts(config, default_top_k=4, shared_size=shared, shared_gate=True),
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
        experts=read_qwen_experts(config, default_top_k=8),
        **(uniform_window(config, default=4096) if slides else {}),
    )


def read_flex_olmo(architecture: str, config: JsonObject) -> ModelArch:
    """FlexOlmo (W. Shi et al., 2025, arXiv:2507.07024): OLMo 2 with experts in every layer."""
    experts = read_experts(
        config,
        count="num_experts",
        size="intermediate_size",
        layers=all_layers(config),
        routing={"default_top_k": 5, "normalized": config.flag("norm_topk_prob", False)},
    )
    return read_olmo2(architecture, config, experts=experts, norm_eps=rms_eps(config, 1e-6), theta=5e5)


def read_ernie_moe(architecture: str, config: JsonObject) -> ModelArch:
    """ERNIE 4.5 MoE (Baidu, 2025): a bias, which chooses only, on top of a softmax; the first layers are dense."""
    config.only("use_bias", False)
    config.only("moe_norm_min", 1e-12)
    first = config.integer("moe_layer_start_index", 1, low=0)
    last = config.integer("moe_layer_end_index", -1, low=-1)
    interval = config.integer("moe_layer_interval", 1)
    layers = all_layers(config)
    size = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    config = config.with_values(head_dim=read_head_dim(config, config.integer("num_attention_heads")))
    experts = read_experts(
        either(config, {"num_experts_per_tok": "moe_k"}),
        count="moe_num_experts",
        size="moe_intermediate_size",
        layers=tuple(
            layer
            for layer in layers
            if (layer + 1) % interval == 0 and first <= layer <= (last if last >= 0 else len(layers))
        ),
        routing={"default_top_k": 6, "normalized": True},
        correction_bias="moe_statics.e_score_correction_bias",
        correction_is_row=True,
        shared_size=size * config.integer("moe_num_shared_experts", 2, low=0, high=64),
    )
    names = CheckpointNames(_SHARED_EXPERTS, unused=(r"\.rotary_emb\.inv_freq$", r"^model\.mtp_"))
    return read_ernie(architecture, config, names=names, experts=experts)


def read_hunyuan_moe(architecture: str, config: JsonObject) -> ModelArch:
    """Hunyuan A13B (Tencent, 2025): experts, and one of their size that sees every token, in every layer."""
    size = config.integer("intermediate_size", high=MAX_WIDTH)
    for key, usual in (("num_experts", None), ("moe_topk", None), ("moe_intermediate_size", size)):
        if isinstance(values := config.get(key), list) and values:
            config.only(key, [usual or values[0]] * len(values))
            config = config.with_values(**{key: values[0]})
    config.only("num_shared_expert", 1, [1] * config.integer("num_hidden_layers", high=MAX_LAYERS))
    experts = read_experts(
        either(config, {"num_experts_per_tok": "moe_topk"}),
        count="num_experts",
        size="intermediate_size",
        layers=all_layers(config),
        routing={"default_top_k": 1, "normalized": True},
        shared_size=size,
    )
    more = {"gate": "gate.wg", "shared_expert": "shared_mlp"}
    return read_hunyuan(architecture, config, names=more, experts=experts)
