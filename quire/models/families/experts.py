# SPDX-License-Identifier: Apache-2.0
"""Sparse families (mixture of experts, arXiv:1701.06538) and the fields they share.

Among them DBRX (Databricks, 2024), gpt-oss (OpenAI, 2025, arXiv:2508.10925), JetMoE (Shen et al., 2024,
arXiv:2404.07413, with experts in attention, too), Llama 4's text model (Meta, 2025), and models with DeepSeek-V3's
load-balancing bias (arXiv:2412.19437) and ordinary attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import (
    QKV_APART,
    CheckpointNames,
    ExpertsArch,
    ExpertStack,
    ModelArch,
    Routing,
    Temperature,
)
from quire.models.families.fields import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    alternating_window,
    biases,
    declared_windows,
    either,
    full_layers,
    layer_norm,
    read_head_dim,
    read_kv_heads,
    read_llama,
    rms_eps,
    uniform_window,
    unrotated_layers,
)
from quire.models.families.llama_like import read_ernie
from quire.models.families.olmo import read_hunyuan, read_olmo2
from quire.models.json_object import JsonObject
from quire.models.rope_config import CHUNKED, FULL, read_rope


def read_experts(
    config: JsonObject,
    *,
    count: str,
    size: str,
    layers: tuple[int, ...],
    routing: dict[str, Any],
    **more: Any,
) -> ExpertsArch | None:
    """Read the experts, by the keys of their number and size; None if no layer has any.

    `routing` has the family's routing fields and `default_top_k`. Experts are gated by SiLU.
    """
    if not layers:
        return None
    config.choice("hidden_act", ("silu",), "silu")
    experts = config.integer(count, high=MAX_EXPERTS)
    default_top_k = routing.pop("default_top_k")
    optional = {} if default_top_k is None else {"default": default_top_k}
    most = experts // routing.get("groups", 1) * routing.get("top_groups", 1)
    top_k = config.integer("num_experts_per_tok", **optional, high=most)
    return ExpertsArch(
        count=experts,
        intermediate_size=config.integer(size, high=MAX_WIDTH),
        routing=Routing(top_k, **routing),
        layers=layers,
        **more,
    )


def read_deepseek_experts(
    config: JsonObject,
    *,
    default_top_k: int | None,
    first: int,
    shared: int,
    normalized: bool,
    balanced: bool = True,
    default_scale: float = 1.0,
    correction_bias: str = "gate.e_score_correction_bias",
    shared_size: int | None = None,
    layers: tuple[int, ...] | None = None,
    **more: Any,
) -> ExpertsArch | None:
    """Read DeepSeek-V3's experts (arXiv:2412.19437) by its keys: groups, and a load-balancing bias.

    Without `balanced` they are V2's (arXiv:2405.04434): softmax routing, and a group's score is its best expert's. Five
    arguments are defaults: experts per token, first sparse layer, number of shared experts, whether weights are
    normalized,
    and their scale. `shared_size` is a shared expert's size if it differs; `layers` are the sparse layers if not all
    after
    the first.
    """
    experts = config.integer("n_routed_experts", high=MAX_EXPERTS)
    groups = config.integer("n_group", 1, high=experts)
    if experts % groups:
        raise config.wrong("n_group", f"a divisor of n_routed_experts ({experts})")
    dense = config.integer("first_k_dense_replace", first, low=0)
    size = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    return read_experts(
        config,
        count="n_routed_experts",
        size="moe_intermediate_size",
        layers=all_layers(config)[dense:] if layers is None else layers,
        routing={
            "default_top_k": default_top_k,
            "scores": "sigmoid" if balanced else "softmax",
            "groups": groups,
            "top_groups": config.integer("topk_group", 1, high=groups),
            "group_members": min(2, experts // groups) if balanced else 1,
            "normalized": config.flag("norm_topk_prob", normalized),
            "scale": config.number("routed_scaling_factor", default_scale),
        },
        correction_bias=correction_bias if balanced else None,
        shared_size=(shared_size or size) * config.integer("n_shared_experts", shared, low=0, high=64),
        **more,
    )


def read_qwen_experts(
    config: JsonObject, *, default_top_k: int, normalized: bool = False, **more: Any
) -> ExpertsArch | None:
    """Read Qwen 2's and 3's experts: in every `decoder_sparse_step`-th layer but those that the file excepts."""
    step = config.integer("decoder_sparse_step", 1)
    excepted = config.numbers("mlp_only_layers") if "mlp_only_layers" in config else ()
    layers = tuple(layer for layer in all_layers(config) if (layer + 1) % step == 0 and layer not in excepted)
    return read_experts(
        either(config, {"num_experts": "num_local_experts"}),
        count="num_experts",
        size="moe_intermediate_size",
        layers=layers,
        routing={"default_top_k": default_top_k, "normalized": config.flag("norm_topk_prob", normalized)},
        **more,
    )


def all_layers(config: JsonObject) -> tuple[int, ...]:
    """Return the numbers of all layers."""
    return tuple(range(config.integer("num_hidden_layers", high=MAX_LAYERS)))


_SHARED_EXPERTS = {"shared_expert": "shared_experts"}
_TRINITY_NAMES = CheckpointNames(
    _SHARED_EXPERTS
    | {
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
        "gate": "router.gate",
    },
    {"qkv_proj": ("q_proj", "k_proj", "v_proj", "gate_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
)


def read_glm4_moe(architecture: str, config: JsonObject) -> ModelArch:
    """GLM 4.5 to 4.7 (arXiv:2508.06471): half of each head is rotated; MTP layers are skipped."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    names = CheckpointNames(
        _SHARED_EXPERTS, unused=(r"\.rotary_emb\.inv_freq$", rf"^model\.layers\.{num_layers}\.")
    )
    return read_llama(
        architecture,
        config,
        names=names,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        qk_norm="rms" if config.flag("use_qk_norm", False) else None,
        norm_eps=rms_eps(config, 1e-5),
        experts=read_deepseek_experts(config, default_top_k=8, first=1, shared=1, normalized=True),
        **biases(qkv=config.flag("attention_bias", False)),
    )


def read_solar_open(architecture: str, config: JsonObject) -> ModelArch:
    """Solar Open (Upstage, 2026, arXiv:2601.07022): DeepSeek-V3's routing in every layer."""
    experts = read_deepseek_experts(
        config.with_values(first_k_dense_replace=0), default_top_k=8, first=0, shared=1, normalized=True
    )
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_SHARED_EXPERTS),
        # No layer is dense, and the file has no size for dense layers.
        intermediate_size=1,
        default_head_dim=128,
        theta=1e6,
        norm_eps=rms_eps(config, 1e-5),
        experts=experts,
        **biases(qkv=config.flag("attention_bias", False)),
    )


def read_dots1(architecture: str, config: JsonObject) -> ModelArch:
    """dots.llm1 (2025, arXiv:2506.05767): q and k are normed per head."""
    first = config.integer("max_window_layers", 62, low=0)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_SHARED_EXPERTS),
        qk_norm="rms",
        experts=read_deepseek_experts(config, default_top_k=None, first=0, shared=0, normalized=False),
        **declared_windows(config, lambda layer: layer >= first),
    )


def read_afmoe(architecture: str, config: JsonObject) -> ModelArch:
    """Trinity (Arcee, 2025): gated attention outputs; a window and positions on all but every fourth layer."""
    for key, value in (("attention_bias", False), ("score_func", "sigmoid"), ("route_norm", True)):
        config.only(key, value)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        config.only(key, 1)
    windows = alternating_window(
        config, period=config.integer("global_attn_every_n_layers", 4, high=MAX_LAYERS), default=1024
    )
    size = config.integer("moe_intermediate_size", 1408, high=MAX_WIDTH)
    routing = {
        "default_top_k": 6,
        "scores": "sigmoid",
        "normalized": True,
        "scale": config.number("route_scale", 1.0),
    }
    experts = read_experts(
        config,
        count="num_experts",
        size="moe_intermediate_size",
        layers=all_layers(config)[config.integer("num_dense_layers", 1, low=0) :],
        routing=routing,
        correction_bias="expert_bias",
        shared_size=size * config.integer("num_shared_experts", 2, low=0, high=64),
    )
    mup = config.flag("mup_enabled", False)
    return read_llama(
        architecture,
        config,
        names=_TRINITY_NAMES,
        block="sandwich",
        default_head_dim=128,
        norm_eps=rms_eps(config, 1e-5),
        qk_norm="rms",
        attention_gate=True,
        unrotated_layers=full_layers(windows),
        embedding_multiplier=config.integer("hidden_size", high=MAX_WIDTH) ** 0.5 if mup else None,
        experts=experts,
        **biases(False),
        **windows,
    )


_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_NAMES = {
    "model": "transformer",
    "embed_tokens": "wte",
    "layers": "blocks",
    "input_layernorm": "norm_attn_norm.norm_1",
    "self_attn": "norm_attn_norm.attn",
    "qkv_proj": "Wqkv",
    "o_proj": "out_proj",
    "post_attention_layernorm": "norm_attn_norm.norm_2",
    "mlp": "ffn",
    "gate": "router.layer",
    "experts": "experts.mlp",
    "down_proj": "w2",
    "norm": "norm_f",
}
_STACK = ExpertStack(("down_proj",), flat=True, weight="")


def read_dbrx(architecture: str, config: JsonObject) -> ModelArch:
    """Experts in every layer, layer norms without bias, and bounds for q, k and v."""
    config = either(config, _KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    attention, experts = config.child("attn_config"), config.child("ffn_config")
    head_dim = read_head_dim(config, heads)
    # Theta is in the attention object.
    rotary = config if "rope_theta" in config else config.with_values(rope_theta=attention.get("rope_theta"))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_NAMES, {"gate_up_proj": ("w1", "v1")}),
        intermediate_size=experts.integer("ffn_hidden_size", 3584, high=MAX_WIDTH),
        head_dim=head_dim,
        num_kv_heads=read_kv_heads(attention, heads, "kv_n_heads") if "kv_n_heads" in attention else 1,
        rope=read_rope(rotary, head_dim=head_dim),
        qkv_clip=attention.optional_number("clip_qkv", low=1e-6),
        norm_bias=False,
        experts=_experts(config, experts),
        **layer_norm(config),
        **biases(False),
    )


def _experts(config: JsonObject, ffn: JsonObject) -> ExpertsArch | None:
    ffn.child("ffn_act_fn").choice("name", ("silu",), "silu")
    ffn.only("moe_normalize_expert_weights", 1)
    normalized = ffn.values.get("moe_normalize_expert_weights", 1) is not None
    return read_experts(
        either(ffn, {"num_experts_per_tok": "moe_top_k"}),
        count="moe_num_experts",
        size="ffn_hidden_size",
        layers=all_layers(config),
        routing={"default_top_k": 1, "normalized": normalized},
        stack=_STACK,
    )


_GPT_OSS_STACK = ExpertStack(gate_up="gate_up_proj", interleaved=True, weight="", bias="_bias")


def read_gpt_oss(architecture: str, config: JsonObject) -> ModelArch:
    """Attention sinks, a window on every other layer, biases everywhere, and its own SwiGLU variant."""
    config.only("swiglu_alpha", 1.702)
    config.only("swiglu_limit", 7.0)
    experts = read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=all_layers(config),
        # A softmax over the chosen equals one over all, divided by its sum over the chosen.
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
    """Return the layout of experts: OpenAI's MXFP4, or floats, which are also transposed."""
    if config.child("quantization_config").get("quant_method") == "mxfp4":
        return _GPT_OSS_STACK
    return replace(_GPT_OSS_STACK, transposed=("gate_up_proj", "down_proj"))


_JETMOE_NAMES = CheckpointNames(
    {
        "self_attn": "self_attention",
        "self_attn.gate": "experts.router.layer",
        "self_attn.input_linear": "experts.input_linear",
        "self_attn.output_linear": "experts.output_linear",
        "self_attn.bias": "experts.bias",
        "mlp.gate": "router.layer",
        "mlp.experts": "",
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
    },
    {},
)


def read_jetmoe(architecture: str, config: JsonObject) -> ModelArch:
    """JetMoE; only the last norm has the file's epsilon."""
    config.choice("activation_function", ("silu",), "silu")
    experts = read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=all_layers(config),
        routing={"default_top_k": 2, "normalized": True},
        stack=ExpertStack(),
        out_bias=True,
    )
    assert experts is not None, "there are layers"
    kv_heads = config.integer("num_key_value_heads", 16, high=MAX_HEADS)
    return read_llama(
        architecture,
        config.with_values(num_attention_heads=kv_heads * experts.routing.top_k),
        names=_JETMOE_NAMES,
        layer_types=("mixture_of_attention",) * config.integer("num_hidden_layers"),
        attention_experts=experts,
        experts=experts,
        num_kv_heads=kv_heads,
        head_dim=config.integer("kv_channels", 128, high=MAX_WIDTH),
        norm_eps=1e-6,
        final_norm_eps=rms_eps(config, 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **biases(False),
    )


_LLAMA4_NAMES = CheckpointNames({"mlp": "feed_forward", "gate": "router"})
_LLAMA4_STACK = ExpertStack(("gate_up_proj", "down_proj"), gate_up="gate_up_proj", weight="")


def read_llama4(architecture: str, config: JsonObject) -> ModelArch:
    """Chunked attention, but for every fourth layer, which has no positions; one routed expert beside a shared one."""
    heads = config.integer("num_attention_heads")
    head_dim, unrotated = read_head_dim(config, heads, 128), unrotated_layers(config)
    attention_bias = config.flag("attention_bias", False)
    return read_llama(
        architecture,
        config,
        names=_LLAMA4_NAMES,
        intermediate_size=config.integer("intermediate_size_mlp", 16384, high=MAX_WIDTH),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, theta=5e5, interleaved=True),
        unrotated_layers=unrotated,
        # An unweighted norm is the same before and after the rotation.
        qk_norm="unweighted_rms" if config.flag("use_qk_norm", True) else None,
        unnormed_layers=unrotated,
        temperature=_temperature(config),
        norm_eps=rms_eps(config, 1e-5),
        experts=_llama4_experts(config),
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
    """Chunks on the layers that the file names, else on those with positions."""
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


def _llama4_experts(config: JsonObject) -> ExpertsArch | None:
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
        stack=_LLAMA4_STACK,
        weighs_input=True,
        shared_size=config.integer("intermediate_size", high=MAX_WIDTH),
    )


MIXTRAL_NAMES = CheckpointNames(
    {"mlp": "block_sparse_moe", "down_proj": "w2"}, {**QKV_APART, "gate_up_proj": ("w1", "w3")}
)


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
    """Qwen 1.5 and 2 MoE (arXiv:2407.10671): a shared expert, weighted by its own gate."""
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
    """ERNIE 4.5 MoE (Baidu, 2025): softmax routing with a selection bias; the first layers are dense."""
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
    """Hunyuan A13B (Tencent, 2025): experts, and a shared one of the same size, in every layer."""
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
