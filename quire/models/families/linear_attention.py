# SPDX-License-Identifier: Apache-2.0
"""Models with linear attention, and sparse relatives with full attention.

Kimi Linear (Kimi team, 2025, arXiv:2510.26692), Ling 1 to 3, named Bailing, and Ring (Ling team, 2025,
arXiv:2503.05139, arXiv:2510.22115), MiniMax-01 (2025, arXiv:2501.08313) and M2, RWKV-7 "Goose" (B. Peng et al., 2025,
arXiv:2503.14456, in flash-linear-attention's format), LFM2 (Liquid AI, 2025, arXiv:2511.23404: short convolutions).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import (
    CheckpointNames,
    DeltaArch,
    ExpertsArch,
    LatentArch,
    ModelArch,
    RotatedLightningArch,
    RWKV7Arch,
    ShortConvArch,
)
from quire.models.families.deepseek import attention_scale, read_latent_sizes
from quire.models.families.experts import MIXTRAL_NAMES, all_layers, read_deepseek_experts, read_experts
from quire.models.families.fields import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    either,
    layer_kinds,
    layer_norm,
    read_arch,
    read_head_dim,
    read_llama,
    rms_eps,
)
from quire.models.families.mamba import POSITIONS
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, read_rope

_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "qkv_proj": "query_key_value",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "o_proj": "dense",
    "shared_expert": "shared_experts",
}
_MERGED = {"gate_up_proj": ("gate_proj", "up_proj")}


def read_bailing(architecture: str, config: JsonObject) -> ModelArch:
    """Ling: softmax routing, with shared experts."""
    config.only("norm_softmax", False)
    size = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    top_k = config.integer("num_experts_per_tok", high=MAX_EXPERTS)
    experts = read_experts(
        config,
        count="num_experts",
        size="moe_intermediate_size",
        layers=all_layers(config)[config.integer("first_k_dense_replace", 0, low=0) :],
        routing={"default_top_k": None, "normalized": config.flag("norm_topk_prob", True) and top_k > 1},
        shared_size=size * config.integer("num_shared_experts", 0, low=0, high=64),
    )
    return _read(architecture, config, experts, head_of_unit_rows=config.flag("norm_head", False))


def read_bailing_v2(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Ling 2.0: DeepSeek-V3's routing; heads are normed and half rotated."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    return _read(
        architecture,
        config,
        _read_balanced(config),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        qk_norm="rms" if config.flag("use_qk_norm", False) else None,
        **fields,
    )


def read_bailing_linear(architecture: str, config: JsonObject) -> ModelArch:
    """Ring-linear (arXiv:2510.19338): Ling 2.0 with lightning attention in most layers."""
    return read_bailing_v2(architecture, config, **_lightning(config, FULL))


def read_bailing_v2_5(architecture: str, config: JsonObject) -> ModelArch:
    """Ling 2.5 (Ling team, 2026): Ring-linear with latent attention in the full-attention layers."""
    latent = read_latent_sizes(config)
    lightning = _lightning(config, "latent_attention")
    head_dim = lightning["rotated_lightning"].head_dim
    rope = read_rope(
        config, head_dim=latent.rope_size, interleaved=config.flag("rope_interleave", True), partial=1.0
    )
    rope, turned = replace(rope, partial_rotary_factor=1.0), read_rope(config, head_dim=head_dim, partial=0.5)
    return _read(
        architecture,
        config,
        _read_balanced(config),
        names=_latent_names(config, latent),
        latent=latent,
        head_dim=latent.rope_size,
        rope=rope,
        # Tables are made for heads of the other layers' size.
        rope_local=replace(turned, partial_rotary_factor=turned.rotated(head_dim) / latent.rope_size),
        attention_scale=attention_scale(latent, rope),
        **lightning,
    )


def _read_balanced(config: JsonObject) -> ExpertsArch | None:
    config.only("score_function", "sigmoid")
    return read_deepseek_experts(
        either(config, {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}),
        default_top_k=None,
        first=0,
        shared=0,
        normalized=True,
        correction_bias="gate.expert_bias",
        shared_size=config.optional_integer("moe_shared_expert_intermediate_size", high=MAX_WIDTH),
    )


def _lightning(config: JsonObject, attends: str) -> dict[str, Any]:
    """Return lightning fields; the last layer of each group attends, as do those of an incomplete group."""
    for key in ("linear_silu", "use_linear_silu", "use_bias", "use_qkv_bias"):
        config.only(key, False)
    config.only("linear_rope", True)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    groups, layers = config.integer("group_norm_size", 1, high=heads), all_layers(config)
    if heads % groups:
        raise config.wrong("group_norm_size", f"a divisor of num_attention_heads ({heads})")
    size = config.integer("layer_group_size", 1, high=MAX_LAYERS)
    grouped = len(layers) // size * size
    return {
        "layer_types": tuple(
            attends if (layer + 1) % size == 0 or layer >= grouped else "rotated_lightning"
            for layer in layers
        ),
        "rotated_lightning": RotatedLightningArch(
            head_dim=read_head_dim(config, heads), groups=groups, qk_norm=config.flag("use_qk_norm", False)
        ),
    }


def _latent_names(config: JsonObject, latent: LatentArch) -> CheckpointNames:
    compressed = ("kv_a_proj_with_mqa",) if latent.query_rank is None else ("q_a_proj", "kv_a_proj_with_mqa")
    return replace(
        _names(config),
        renamed={**_NAMES, "k_up": "kv_b_proj", "v_up": "kv_b_proj"},
        merged={**_MERGED, "qkv_a_proj": compressed},
    )


def _names(config: JsonObject) -> CheckpointNames:
    # A layer after the last (MTP) is skipped.
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    unused = (r"\.rotary_emb\.inv_freq$", rf"^model\.layers\.{num_layers}\.", r"^model\.mtp")
    return CheckpointNames(_NAMES, _MERGED, unused)


def _read(architecture: str, config: JsonObject, experts: ExpertsArch | None, **fields: Any) -> ModelArch:
    return read_llama(
        architecture,
        config,
        **{"names": _names(config)} | fields,
        experts=experts,
        **biases(qkv=config.flag("use_qkv_bias", False), out=config.flag("use_bias", False)),
    )


_KINDS = {FULL: FULL, "linear_attention": "lightning"}
_SCALES = {FULL: "full_attn", "lightning": "linear_attn", "mlp": "mlp"}
_PUBLISHED_SCALES = {
    f"{ours}_{kind}_factor": f"layernorm_{theirs}_{kind}"
    for ours, theirs in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    for kind in ("alpha", "beta")
}
_MINIMAX_NAMES = replace(
    MIXTRAL_NAMES,
    renamed={**MIXTRAL_NAMES.renamed, "lightning_qkv": "qkv_proj"},
    unused=(*MIXTRAL_NAMES.unused, r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$"),
)


def read_minimax(architecture: str, config: JsonObject) -> ModelArch:
    """MiniMax: lightning and full attention, experts in every layer, and a normed residual stream."""
    config.only("sliding_window")
    return read_llama(
        architecture,
        config,
        names=_MINIMAX_NAMES,
        theta=1e6,
        norm_eps=rms_eps(config, 1e-5),
        block="normed_stream",
        layer_types=layer_kinds(config, _KINDS, lambda layer: "lightning" if layer % 2 else FULL),
        stream_scales={
            kind: (config.number(f"{key}_alpha_factor", 1.0), config.number(f"{key}_beta_factor", 1.0))
            for kind, key in _SCALES.items()
        },
        experts=read_experts(
            config,
            count="num_local_experts",
            size="intermediate_size",
            layers=all_layers(config),
            routing={"default_top_k": 2, "normalized": True},
        ),
        **biases(False),
    )


def read_minimax_text_01(architecture: str, config: JsonObject) -> ModelArch:
    """MiniMax-Text-01 and M1 (2025, arXiv:2506.13585) as published: other keys, and partial rotation."""
    config.only("postnorm", True)
    config.only("shared_intermediate_size", 0)
    config.only("attention_type", 0, 1)
    config.get("shared_moe_mode")
    kinds = {0.0: "linear_attention", 1.0: FULL}
    types = config.numbers("attn_type_list")
    if not set(types) <= kinds.keys():
        raise config.unsupported("attn_type_list", "a list of 0 and 1")
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    rotated = config.integer("rotary_dim", head_dim, high=head_dim)
    config = config.with_values(
        layer_types=[kinds[number] for number in types], partial_rotary_factor=rotated / head_dim
    )
    return read_minimax(architecture, config.with_aliases(_PUBLISHED_SCALES))


def read_minimax_m2(architecture: str, config: JsonObject) -> ModelArch:
    """MiniMax M2 (2025): norms of all of q and all of k; sigmoid routing with a load-balancing bias."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"), 128)
    partial = config.integer("rotary_dim", head_dim, high=head_dim) / head_dim
    return read_llama(
        architecture,
        config,
        names=MIXTRAL_NAMES,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, theta=5e6, partial=partial),
        qk_norm="row_rms",
        experts=read_experts(
            config,
            count="num_local_experts",
            size="intermediate_size",
            layers=all_layers(config),
            routing={"default_top_k": 8, "scores": "sigmoid", "normalized": True},
            correction_bias="e_score_correction_bias",
        ),
        **biases(False),
    )


_LORAS = {
    f"{name}_{end}": f"{name}_lora.lora.{place}"
    for name in ("w", "v", "a", "g")
    for end, place in (("down", 0), ("up", 2))
}
_RWKV_NAMES = CheckpointNames(
    {
        "embed_tokens": "embeddings",
        "embed_norm": "layers.0.pre_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **_LORAS,
    },
    merged={},
)


def read_rwkv7(architecture: str, config: JsonObject) -> ModelArch:
    """RWKV-7: recurrent layers only; heads are given by number or by size."""
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    config.only("attn")
    config.only("hidden_act", "sqrelu")
    config.only("value_dim", hidden, [hidden] * layers)
    return read_arch(
        architecture,
        config,
        names=_RWKV_NAMES,
        intermediate_size=_width(config, hidden),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        layer_types=("rwkv7",) * layers,
        max_position_embeddings=config.integer("max_position_embeddings", POSITIONS),
        embedding_norm=config.flag("norm_first", True),
        norm_bias=config.flag("norm_bias", True),
        rwkv7=RWKV7Arch(
            head_dim=_head_dim(config, hidden),
            decay_rank=config.integer("decay_low_rank_dim", high=MAX_WIDTH),
            value_rank=config.integer("v_low_rank_dim", high=MAX_WIDTH),
            rate_rank=config.integer("a_low_rank_dim", high=MAX_WIDTH),
            gate_rank=config.integer("gate_low_rank_dim", high=MAX_WIDTH),
        ),
        **layer_norm(config, "norm_eps"),
    )


def _head_dim(config: JsonObject, hidden: int) -> int:
    size = config.optional_integer("head_dim", high=hidden)
    if size is None:
        heads = config.integer("num_heads", max(1, hidden // 64), high=hidden)
        size = hidden // heads if hidden % heads == 0 else hidden + 1
    if hidden % size:
        raise config.wrong("hidden_size", "a multiple of the size of heads")
    return size


def _width(config: JsonObject, hidden: int) -> int:
    """Return the MLP's intermediate size: by default a multiple of 32."""
    given = config.optional_integer("intermediate_size", high=MAX_WIDTH)
    return given or -(-int(hidden * config.number("hidden_ratio", 4.0, high=1e4)) // 32) * 32


_LFM_NAMES = CheckpointNames(
    {
        "mlp": "feed_forward",
        "down_proj": "w2",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "norm": "embedding_norm",
    },
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("w1", "w3")},
)
_LFM_KINDS = {FULL: FULL, "conv": "short_conv"}
_MAX_TAPS = 64


def read_lfm2(architecture: str, config: JsonObject) -> ModelArch:
    """Dense LFM2; the file's MLP size is reduced to two thirds, rounded up."""
    config = either(config, {"tie_word_embeddings": "tie_embedding"})
    return _read_lfm(architecture, config, intermediate_size=_mlp_size(config))


def read_lfm2_moe(architecture: str, config: JsonObject) -> ModelArch:
    """Experts after the first layers, sigmoid routing with a load-balancing bias."""
    config = either(config, {"tie_word_embeddings": "tie_embedding"})
    experts = read_experts(
        config,
        count="num_experts",
        size="moe_intermediate_size",
        layers=all_layers(config)[config.integer("num_dense_layers", 2, low=0) :],
        routing={
            "default_top_k": 4,
            "scores": "sigmoid",
            "normalized": config.flag("norm_topk_prob", True),
            "scale": config.number("routed_scaling_factor", 1.0),
        },
        correction_bias="expert_bias" if config.flag("use_expert_bias", True) else None,
    )
    return _read_lfm(architecture, config, experts=experts)


def _read_lfm(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    attends = config.numbers("full_attn_idxs") if "full_attn_idxs" in config else all_layers(config)
    bias = config.flag("conv_bias", False)
    fields = {
        "names": _LFM_NAMES,
        "theta": 1e6,
        "norm_eps": config.number("norm_eps", 1e-5, high=1.0),
        "qk_norm": "rms",
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "layer_types": layer_kinds(
            config, _LFM_KINDS, lambda layer: FULL if layer in attends else "short_conv"
        ),
        "short_conv": ShortConvArch(config.integer("conv_L_cache", 3, low=2, high=_MAX_TAPS), bias),
    }
    return read_llama(architecture, config, **(fields | biases(False) | differing))


def _mlp_size(config: JsonObject) -> int:
    size = either(config, {"block_ff_dim": "intermediate_size"}).integer("block_ff_dim", high=MAX_WIDTH)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(config.number("block_ffn_dim_multiplier", 1.0, high=64.0) * int(2 * size / 3))
    multiple = config.integer("block_multiple_of", 256, high=MAX_WIDTH)
    return -(-size // multiple) * multiple


_LATENT = "latent_attention"
_KIMI_KINDS = {FULL: _LATENT, "linear_attention": "kimi_delta"}
_KEYS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "max_position_embeddings": "model_max_length",
}
"""Keys that differ from DeepSeek-V3's."""
_KIMI_MERGED = {
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
    "qkv_a_proj": ("kv_a_proj_with_mqa",),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_DELTA = ("q_proj", "k_proj", "v_proj", "b_proj")
_RENAMED = {"k_up": "kv_b_proj", "v_up": "kv_b_proj", "shared_expert": "shared_experts"}
_LING_NAMES = {"embed_tokens": "word_embeddings", "self_attn": "attention", "o_proj": "dense"}


def read_kimi_linear(architecture: str, config: JsonObject) -> ModelArch:
    """Kimi Linear: no rotation; positions come from the delta rule only."""
    config.only("mla_use_nope", True)
    config.only("q_lora_rank")
    config.only("moe_layer_freq", 1)
    config.only("moe_router_activation_func", "sigmoid")
    config = either(config, _KEYS)
    # Experts are named as Mixtral's, and dense layers as Llama's.
    sparse = _sparse_layers(config, 1)
    renamed = {f"layers.{layer}.mlp": "block_sparse_moe" for layer in sparse} | {"experts.*.down_proj": "w2"}
    merged = {"in_proj": (*_DELTA, "f_a_proj", "g_a_proj"), "experts.*.gate_up_proj": ("w1", "w3")}
    return _read_linear_attention(
        architecture,
        config,
        read_latent_sizes(config),
        names=CheckpointNames(_RENAMED | renamed, _KIMI_MERGED | merged),
        layer_types=_kimi_layers(config),
        delta=_read_kimi_delta(config),
        rope=None,
        norm_eps=rms_eps(config, 1e-5),
        experts=_read_experts(config, sparse, default_scale=2.446),
    )


def read_bailing_hybrid(architecture: str, config: JsonObject) -> ModelArch:
    """Ling 3.0 (Ling team, 2026): bounded decays, and gated latent attention heads."""
    config.only("q_lora_rank")
    config = either(config, _KEYS)
    latent = replace(read_latent_sizes(config), gated=True)
    rope = read_rope(config, head_dim=latent.rope_size, theta=6e6, interleaved=True)
    interval = config.integer("layer_group_size", 6)
    num_layers = len(all_layers(config))
    return _read_linear_attention(
        architecture,
        config,
        latent,
        names=CheckpointNames(
            _RENAMED | _LING_NAMES,
            _KIMI_MERGED | {"in_proj": (*_DELTA, "f_proj", "g_proj")},
            unused=(rf"^model\.layers\.{num_layers}\.", r"^model\.mtp", r"\.rotary_emb\.inv_freq$"),
            adapters=CheckpointNames(
                _RENAMED, _KIMI_MERGED | {"in_proj": (*_DELTA, "forget_gate.f_proj", "g_proj")}
            ),
        ),
        layer_types=layer_kinds(
            config, _KIMI_KINDS, lambda layer: "kimi_delta" if (layer + 1) % interval else _LATENT
        ),
        delta=_read_ling_delta(config),
        rope=rope,
        attention_scale=attention_scale(latent, rope),
        experts=_read_experts(
            config, _sparse_layers(config, 2), default_scale=2.5, correction_bias="gate.expert_bias"
        ),
    )


def _read_linear_attention(
    architecture: str, config: JsonObject, latent: LatentArch, **fields: Any
) -> ModelArch:
    return read_llama(
        architecture, config, latent=latent, head_dim=latent.rope_size, mlp_bias=False, **fields
    )


def _read_experts(config: JsonObject, layers: tuple[int, ...], **more: Any) -> ExpertsArch | None:
    return read_deepseek_experts(
        config, default_top_k=8, first=0, shared=1, normalized=True, layers=layers, **more
    )


def _kimi_layers(config: JsonObject) -> tuple[str, ...]:
    """Return layer kinds; published files list the layers of one kind, counting from 1."""
    numbers = config.child("linear_attn_config")
    attends = numbers.numbers("full_attn_layers") if "full_attn_layers" in numbers else None

    def kind(layer: int) -> str:
        is_full = layer % 4 == 0 and layer > 0 if attends is None else layer + 1 in attends
        return _LATENT if is_full else "kimi_delta"

    return layer_kinds(config, _KIMI_KINDS, kind)


def _sparse_layers(config: JsonObject, dense: int) -> tuple[int, ...]:
    """Return the sparse layers: all but the first ones, unless the file lists them."""
    if "mlp_layer_types" not in config:
        return all_layers(config)[config.integer("first_k_dense_replace", dense, low=0) :]
    kinds = config.texts("mlp_layer_types")
    return tuple(layer for layer in all_layers(config) if kinds[layer : layer + 1] == ("sparse",))


def _read_kimi_delta(config: JsonObject) -> DeltaArch:
    inner = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    own = config.child("linear_attn_config") if "linear_attn_config" in config else config.with_aliases(inner)
    taps = "short_conv_kernel_size" if "linear_attn_config" in config else "linear_conv_kernel_dim"
    heads, size = own.integer("num_heads", 32, high=MAX_HEADS), own.integer("head_dim", 128, high=MAX_WIDTH)
    return DeltaArch(heads, heads, size, size, taps=own.integer(taps, 4, low=2, high=_MAX_TAPS))


def _read_ling_delta(config: JsonObject) -> DeltaArch:
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    # Files written by transformers have the other layers' size under the usual name.
    size = config.integer(
        "linear_head_dim" if "linear_head_dim" in config else "head_dim", 128, high=MAX_WIDTH
    )
    least = config.number("kda_lower_bound", -5.0, low=-100.0, high=0.0)
    return DeltaArch(
        heads,
        heads,
        size,
        size,
        taps=config.integer("short_conv_kernel_size", 4, low=2, high=_MAX_TAPS),
        least=least if config.flag("kda_safe_gate", True) else None,
        narrow=False,
    )
