# SPDX-License-Identifier: Apache-2.0
"""GPT-2 (Radford et al., 2019) and its descendants: layer norms and plain MLPs, mostly with biases.

With learned or sinusoidal positions GPT-2, StarCoder, GPT-Neo, OPT (Zhang et al., 2022, arXiv:2205.01068) and XGLM (Lin
et al., 2021, arXiv:2112.10668); with ALiBi BLOOM, MPT, Falcon and Jais (Sengupta et al., 2023, arXiv:2308.16149); with
rotary positions GPT-J, GPT-NeoX and their descendants, Jais 2 (2025), Phi-1 to Phi-2 (arXiv:2306.11644,
arXiv:2309.05463), Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config.arch import QKV_APART, CheckpointNames, ModelArch
from quire.models.families.experts import all_layers, read_experts
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    either,
    layer_norm,
    optional_number,
    plain_mlp,
    read_arch,
    read_head_dim,
    read_kv_heads,
    read_llama,
    rms_eps,
    uniform_window,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING, read_rope, with_kind_renamed

_BLOOM_KEYS = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_BLOOM_NAMES = {
    "model": "transformer",
    "embed_tokens": "word_embeddings",
    "embed_norm": "word_embeddings_layernorm",
    "layers": "h",
    "self_attn": "self_attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "ln_f",
}
_MPT_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_MPT_NAMES = {
    "model": "transformer",
    "embed_tokens": "wte",
    "layers": "blocks",
    "input_layernorm": "norm_1",
    "self_attn": "attn",
    "qkv_proj": "Wqkv",
    "o_proj": "out_proj",
    "post_attention_layernorm": "norm_2",
    "mlp": "ffn",
    "norm": "norm_f",
}


def read_bloom(architecture: str, config: JsonObject) -> ModelArch:
    """BLOOM (Scao et al., 2022, arXiv:2211.05100): layer norms, also of the embedding; biases everywhere."""
    config.only("apply_residual_connection_post_layernorm", False)
    config = either(config, _BLOOM_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    return read_arch(
        architecture,
        config,
        names=CheckpointNames(_BLOOM_NAMES, {}),
        intermediate_size=4 * config.integer("hidden_size", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=read_head_dim(config, heads),
        max_position_embeddings=config.integer("seq_length", 2048),
        embedding_norm=True,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_grouped=True,
        alibi=1.0,
        mlp="plain",
        hidden_act="gelu_pytorch_tanh",
        **layer_norm(config, "layer_norm_epsilon"),
        **biases(True),
    )


def read_mpt(architecture: str, config: JsonObject) -> ModelArch:
    """MPT (MosaicML, 2023): no biases, also of norms; q, k and v may be clipped."""
    config.only("no_bias", True)
    config.only("logit_scale")
    config.only("norm_type", "low_precision_layernorm", "layernorm")
    attention = config.child("attn_config")
    for key, value in (("alibi", True), ("alibi_bias_max", 8), ("prefix_lm", False), ("qk_ln", False)):
        attention.only(key, value)
    attention.only("attn_type", "multihead_attention")
    config = either(config, _MPT_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    return read_arch(
        architecture,
        config,
        names=CheckpointNames(_MPT_NAMES, {}),
        intermediate_size=config.integer("expansion_ratio", 4, high=64)
        * config.integer("hidden_size", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=read_head_dim(config, heads),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        norm_bias=False,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        attention_scale=optional_number(attention, "softmax_scale", None),
        qkv_clip=optional_number(attention, "clip_qkv", None),
        alibi=1.0,
        mlp="plain",
        hidden_act="gelu",
        **layer_norm(config, "layer_norm_epsilon"),
    )


def read_falcon(architecture: str, config: JsonObject) -> ModelArch:
    """Falcon (Almazrouei et al., 2023, arXiv:2311.16867): with ALiBi (1B), parallel blocks (7B), two norms (40B)."""
    config = either(config, _BLOOM_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = read_head_dim(config, heads)
    four_times = 4 * config.integer("hidden_size", high=MAX_WIDTH)
    has_alibi = config.flag("alibi", False)
    return read_llama(
        architecture,
        config,
        intermediate_size=config.integer("ffn_hidden_size", four_times, high=MAX_WIDTH),
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_grouped=True,
        rope=None if has_alibi else read_rope(config, head_dim=head_dim),
        # Falcon scales the biases together with the scores.
        alibi=head_dim**-0.5 if has_alibi else None,
        **_falcon_block(config, heads),
        **layer_norm(config, "layer_norm_epsilon"),
        **plain_mlp(config, "gelu", "activation"),
        **biases(config.flag("bias", False)),
    )


def _falcon_block(config: JsonObject, heads: int) -> dict[str, Any]:
    """Return the number of key-value heads and the placement of norms, which one flag changes together."""
    if not config.flag("new_decoder_architecture", False):
        block = "parallel" if config.flag("parallel_attn", True) else "sequential"
        kv_heads = 1 if config.flag("multi_query", True) else heads
        return {"block": block, "num_kv_heads": kv_heads, "names": CheckpointNames(_BLOOM_NAMES, {})}
    config.only("parallel_attn", True)
    kv_heads = read_kv_heads(config, heads, "num_kv_heads")
    if config.integer("num_ln_in_parallel_attn", 2, high=2) == 1:
        return {"block": "parallel", "num_kv_heads": kv_heads, "names": CheckpointNames(_BLOOM_NAMES, {})}
    names = _BLOOM_NAMES | {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
    return {"block": "parallel_two_norms", "num_kv_heads": kv_heads, "names": CheckpointNames(names, {})}


_XGLM_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "attention_heads",
}
_XGLM_NAMES = {
    "input_layernorm": "self_attn_layer_norm",
    "o_proj": "out_proj",
    "post_attention_layernorm": "final_layer_norm",
    "mlp": "",
    "up_proj": "fc1",
    "down_proj": "fc2",
    "norm": "layer_norm",
}


def read_opt(architecture: str, config: JsonObject) -> ModelArch:
    """Learned positions; biases everywhere; the norm before or after; the embedding may be narrower."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    norm_before = config.flag("do_layer_norm_before", True)
    return read_arch(
        architecture,
        config,
        intermediate_size=config.integer("ffn_dim", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=read_head_dim(config, heads),
        norm="layer",
        norm_eps=1e-5,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        do_layer_norm_before=norm_before,
        final_norm=norm_before and not config.flag("_remove_final_layer_norm", False),
        word_embed_proj_dim=config.integer("word_embed_proj_dim", hidden_size, high=MAX_WIDTH),
        **plain_mlp(config, "relu", "activation_function"),
        **biases(config.flag("enable_bias", True)),
    )


def read_xglm(architecture: str, config: JsonObject) -> ModelArch:
    """Sinusoidal positions, of which the first two are unused; scaled embeddings; biases everywhere."""
    config = either(config, _XGLM_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    is_scaled = config.flag("scale_embedding", True)
    return read_arch(
        architecture,
        config,
        names=CheckpointNames(_XGLM_NAMES),
        intermediate_size=config.integer("ffn_dim", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=read_head_dim(config, heads),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        norm="layer",
        norm_eps=1e-5,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        embedding_multiplier=config.integer("hidden_size", high=MAX_WIDTH) ** 0.5 if is_scaled else None,
        positions="sinusoidal",
        position_offset=2,
        **plain_mlp(config, "gelu", "activation_function"),
        **biases(True),
    )


_PHI_NAMES = {
    "o_proj": "dense",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "up_proj": "fc1",
    "down_proj": "fc2",
    "norm": "final_layernorm",
}


def read_phi(architecture: str, config: JsonObject) -> ModelArch:
    """Parallel attention and MLP, half of each head rotated, biases everywhere, in the head too."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_PHI_NAMES),
        block="parallel",
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        qk_norm="layer" if config.flag("qk_layernorm", False) else None,
        head_bias=True,
        **layer_norm(config),
        **plain_mlp(config, "gelu_new"),
        **biases(True),
    )


def read_phimoe(architecture: str, config: JsonObject) -> ModelArch:
    """Phi-3.5-MoE: SparseMixer routing (arXiv:2409.12136), layer norms, biases of attention and head."""
    experts = read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=all_layers(config),
        routing={
            "default_top_k": 2,
            "scores": "sparsemixer",
            "reach": 2 * config.number("router_jitter_noise", 0.01),
        },
    )
    attention_bias = config.flag("attention_bias", False)
    return read_llama(
        architecture,
        _with_one_scale(config),
        names=CheckpointNames(
            {"mlp": "block_sparse_moe", "down_proj": "w2"},
            {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("w1", "w3")},
        ),
        theta=1e6,
        head_bias=config.flag("lm_head_bias", False),
        experts=experts,
        **layer_norm(config, "rms_norm_eps", 1e-5),
        **biases(qkv=attention_bias, out=attention_bias),
        **uniform_window(config, default=None),
    )


def _with_one_scale(config: JsonObject) -> JsonObject:
    """Return the config with longrope's attention factor from `short_mscale`; `long_mscale` must be equal."""
    values = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.child(key)
        if "short_mscale" in rope:
            rope.only("long_mscale", rope.get("short_mscale"))
            values[key] = rope.values | {"attention_factor": rope.number("short_mscale", low=1e-6)}
    return config.with_values(**values)


def read_phi3(architecture: str, config: JsonObject) -> ModelArch:
    """Merged weights; one window for all layers; its early checkpoints call longrope "su" or "yarn"."""
    return read_llama(
        architecture,
        with_kind_renamed(config, {"su": "longrope", "yarn": "longrope"}),
        names=CheckpointNames(merged={}),
        norm_eps=rms_eps(config, 1e-5),
        **uniform_window(config, default=None),
    )


KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
RENAMED = {
    "model": "transformer",
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "layers": "h",
    "input_layernorm": "ln_1",
    "self_attn": "attn",
    "qkv_proj": "c_attn",
    "o_proj": "c_proj",
    "post_attention_layernorm": "ln_2",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
    "norm": "ln_f",
}
# Early checkpoints also hold the causal mask as a tensor.
UNUSED = (r"\.attn\.(masked_)?bias$",)


def read_gpt2(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """q, k and v come merged, and all weights transposed."""
    config = either(config, KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    four_times = 4 * config.integer("hidden_size", high=MAX_WIDTH)
    mlp = {} if "mlp" in differing else plain_mlp(config, "gelu_new", "activation_function")
    fields: dict[str, Any] = {
        "names": CheckpointNames(RENAMED, {}, UNUSED),
        "intermediate_size": config.integer("n_inner", four_times, high=MAX_WIDTH),
        "num_kv_heads": heads,
        "head_dim": read_head_dim(config, heads),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "positions": "learned",
        "transposed_weights": True,
        **layer_norm(config, "layer_norm_epsilon"),
        **biases(True),
        **mlp,
    }
    return read_arch(architecture, config, **(fields | differing))


def read_gpt_bigcode(architecture: str, config: JsonObject) -> ModelArch:
    """StarCoder and SantaCoder (Li et al., 2023, arXiv:2305.06161): one key-value head; weights as Llama has them."""
    heads = either(config, KEYS).integer("num_attention_heads", high=MAX_HEADS)
    return read_gpt2(
        architecture,
        config,
        num_kv_heads=1 if config.flag("multi_query", True) else heads,
        qkv_grouped=True,
        transposed_weights=False,
        **plain_mlp(config, "gelu_pytorch_tanh", "activation_function"),
    )


def read_gpt_neo(architecture: str, config: JsonObject) -> ModelArch:
    """GPT-Neo (Black et al., 2021): scores are not scaled; some layers have a window; q, k and v without biases."""
    keys = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    config = either(config, keys)
    four_times = 4 * config.integer("hidden_size", high=MAX_WIDTH)
    names = RENAMED | {"self_attn": "attn.attention", "o_proj": "out_proj"}
    return read_gpt2(
        architecture,
        config,
        names=CheckpointNames(names, QKV_APART, (r"\.attention\.(masked_)?bias$",)),
        intermediate_size=config.integer("intermediate_size", four_times, high=MAX_WIDTH),
        transposed_weights=False,
        attention_scale=1.0,
        **biases(out=True, mlp=True),
        **_gpt_neo_windows(config),
    )


def _gpt_neo_windows(config: JsonObject) -> dict[str, Any]:
    """Read windows from [[["global", "local"], 12]]: kinds of layers and their repetitions."""
    kinds = {"global": FULL, "local": SLIDING}
    repeats = config.get("attention_types") or [[["global", "local"], 12]]
    try:
        types = tuple(
            kinds[kind] for group, times in repeats for _ in range(min(times, MAX_LAYERS)) for kind in group
        )
    except (TypeError, ValueError, KeyError):
        raise config.wrong("attention_types", 'a list such as [[["global", "local"], 12]]') from None
    if len(types) != config.integer("num_hidden_layers", high=MAX_LAYERS):
        raise config.wrong("attention_types", "a list that makes num_layers layers")
    return {"layer_types": types, "sliding_window": config.integer("window_size", 256)}


def read_jais(architecture: str, config: JsonObject) -> ModelArch:
    """GPT-2 with ALiBi, a gated MLP and muP's multipliers; later checkpoints prefix their keys with "mup_"."""
    for key, value in (
        ("position_embedding_type", "alibi"),
        ("activation_function", "swiglu"),
        ("alibi_scaling", None),
    ):
        config.only(key, value)
    heads = either(config, KEYS).integer("num_attention_heads", high=MAX_HEADS)
    head_dim = read_head_dim(either(config, KEYS), heads)
    names = CheckpointNames(
        RENAMED, {"gate_up_proj": ("c_fc2", "c_fc")}, (*UNUSED, r"\.relative_pe\.slopes$")
    )
    by_size = config.flag("mup_scale_qk_dot_by_d", config.flag("scale_qk_dot_by_d", False))
    return read_gpt2(
        architecture,
        config,
        names=names,
        positions=None,
        alibi=1.0,
        attention_scale=1.0 / head_dim if by_size else None,
        embedding_multiplier=config.number("mup_embeddings_scale", config.number("embeddings_scale", 1.0)),
        logits_multiplier=_logits_multiplier(config),
        mlp="gated",
        hidden_act="silu",
    )


def _logits_multiplier(config: JsonObject) -> float:
    width = config.number("mup_width_scale", config.number("width_scale", 1.0))
    return width * config.number("mup_output_alpha", 1.0)


def read_jais2(architecture: str, config: JsonObject) -> ModelArch:
    """Jais 2 (2025): squared ReLU, layer norms, biases."""
    attention_bias = config.flag("attention_bias", True)
    mlp_bias = config.flag("mlp_bias", True)
    return read_llama(
        architecture,
        config,
        **layer_norm(config),
        **plain_mlp(config, "relu2"),
        **biases(qkv=attention_bias, out=attention_bias, mlp=mlp_bias),
    )


_NEOX_NAMES = {
    "model": "gpt_neox",
    "embed_tokens": "embed_in",
    "self_attn": "attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "final_layer_norm",
    "lm_head": "embed_out",
}
_PROCESSORS = 4
"""Processors over which CodeGen's heads were partitioned in training."""
_PERSIMMON_NAMES = {
    "qkv_proj": "query_key_value",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "final_layernorm",
}


def read_gptj(architecture: str, config: JsonObject) -> ModelArch:
    """GPT-J (Wang and Komatsuzaki, 2021): parallel blocks, adjacent dimensions rotated, biases in MLP and head."""
    config = either(config, KEYS)
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    partial = config.integer("rotary_dim", min(64, head_dim), high=head_dim) / head_dim
    four_times = 4 * config.integer("hidden_size", high=MAX_WIDTH)
    names = RENAMED | {"o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out"}
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(names, unused=UNUSED),
        block="parallel",
        intermediate_size=config.integer("n_inner", four_times, high=MAX_WIDTH),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=partial, interleaved=True),
        head_bias=True,
        **layer_norm(config, "layer_norm_epsilon"),
        **plain_mlp(config, "gelu_new", "activation_function"),
        **biases(mlp=True),
    )


def read_codegen(architecture: str, config: JsonObject) -> ModelArch:
    """CodeGen (Nijkamp et al., 2022, arXiv:2203.13474): GPT-J with projections stored as on four processors."""
    arch = read_gptj(architecture, config)
    if arch.num_heads % _PROCESSORS:
        raise config.wrong("n_head", f"a multiple of {_PROCESSORS}")
    names = CheckpointNames(
        {**arch.names.renamed, "qkv_proj": "qkv_proj"}, {}, (*UNUSED, r"\.attn\.causal_mask$")
    )
    return replace(arch, names=names, qkv_blocks=_PROCESSORS)


def read_gpt_neox(architecture: str, config: JsonObject) -> ModelArch:
    """GPT-NeoX and Pythia (Black et al., 2022, arXiv:2204.06745): parallel blocks with two norms, or sequential."""
    config = either(config, {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"})
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    attention_bias = config.flag("attention_bias", True)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_NEOX_NAMES, {}, (*UNUSED, r"\.attention\.(masked_)?bias$", r"\.inv_freq$")),
        block="parallel_two_norms" if config.flag("use_parallel_residual", True) else "sequential",
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.25),
        qkv_grouped=True,
        **layer_norm(config),
        **plain_mlp(config, "gelu"),
        **biases(qkv=attention_bias, out=attention_bias, mlp=True),
    )


def read_persimmon(architecture: str, config: JsonObject) -> ModelArch:
    """Persimmon (Adept, 2023): squared ReLU, layer norms of q and k, half of each head rotated."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_PERSIMMON_NAMES, {}),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        qkv_grouped=True,
        qk_norm="layer" if config.flag("qk_layernorm", True) else None,
        **layer_norm(config),
        **plain_mlp(config, "relu2"),
        **biases(True),
    )


def read_stablelm(architecture: str, config: JsonObject) -> ModelArch:
    """StableLM 2 (Bellagente et al., 2024, arXiv:2402.17834): Llama with layer norms, a quarter of heads rotated."""
    config = either(config, {"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"})
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"q_norm": "q_layernorm", "k_norm": "k_layernorm"}),
        block="parallel" if config.flag("use_parallel_residual", False) else "sequential",
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.25),
        qk_norm="each_head_layer_apart" if config.flag("qk_layernorm", False) else None,
        **layer_norm(config),
        **biases(qkv=config.flag("use_qkv_bias", False)),
    )


def read_starcoder2(architecture: str, config: JsonObject) -> ModelArch:
    """StarCoder 2 (Lozhkov et al., 2024, arXiv:2402.19173)."""
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"up_proj": "c_fc", "down_proj": "c_proj"}),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **layer_norm(config, "norm_epsilon"),
        **plain_mlp(config, "gelu_pytorch_tanh"),
        **biases(config.flag("use_bias", True)),
        **uniform_window(config, default=None),
    )


def read_nemotron(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Nemotron 3 and 4, Minitron (Parmar et al., 2024, arXiv:2402.16819): squared ReLU, norm weights stored
    minus one."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    return read_llama(
        architecture,
        config,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        norm_offset=1.0,
        **layer_norm(config, "norm_eps"),
        **plain_mlp(config, "relu2"),
    )
