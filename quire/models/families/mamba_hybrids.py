"""Decoders in which most layers keep a state, as Mamba's do, and a few attend."""

from __future__ import annotations

from typing import Any

from quire.config.arch import QKV_APART, CheckpointNames, ExpertsArch, ExpertStack, ModelArch
from quire.models.families.experts import all_layers, read_deepseek_experts, read_experts
from quire.models.families.fields import MAX_LAYERS, MAX_WIDTH, biases, either, plain_mlp, read_llama
from quire.models.families.granite import GRANITE_NAMES, read_granite
from quire.models.families.mamba import NAMES, read_channels, read_heads
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, read_rope

HYBRID_KEYS = {
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "time_step_rank": "mamba_dt_rank",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}
"""What Mamba's own files call otherwise."""
_NORMS = {"post_attention_layernorm": "pre_ff_layernorm", "norm": "final_layernorm"}
STATE_NAMES = {"scan": "", "gated_norm": "norm"}
_ATTENTION, _MAMBA = ("attention", FULL), ("mamba", "linear_attention")
"""What files call layers of each kind."""
_SPARSE = "sparse"


def read_jamba(architecture: str, config: JsonObject) -> ModelArch:
    """Jamba (Lieber et al., 2024, arXiv:2403.19887): Mamba, attention without positions, and experts."""
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    norm_eps = config.number("rms_norm_eps", 1e-6, high=1.0)
    attends = _every(config, "attn_layer_period", 8, "attn_layer_offset", 4)
    sparse = _every(config, "expert_layer_period", 2, "expert_layer_offset", 1)
    experts = read_experts(
        config,
        count="num_experts",
        size="intermediate_size",
        layers=sparse if config.integer("num_experts", 16) > 1 else (),
        routing={"default_top_k": 2},
    )
    channels = hidden * config.integer("mamba_expand", 2, high=64)
    names = {**_NORMS, **STATE_NAMES, "mlp": "feed_forward", "gate": "router"}
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(names),
        layer_types=tuple(FULL if layer in attends else "mamba" for layer in all_layers(config)),
        mamba=read_channels(config.with_aliases(HYBRID_KEYS), channels=channels, norm_eps=norm_eps),
        norm_eps=norm_eps,
        rope=None,
        experts=experts,
        **biases(False),
    )


def read_bamba(architecture: str, config: JsonObject) -> ModelArch:
    """Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba 2, and attention that rotates half of each head."""
    norm_eps = config.number("rms_norm_eps", 1e-5, high=1.0)
    attends = config.numbers("attn_layer_indices") if "attn_layer_indices" in config else ()
    head_dim = config.integer("hidden_size", high=MAX_WIDTH) // config.integer("num_attention_heads")
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({**_NORMS, **STATE_NAMES, "mlp": "feed_forward"}),
        layer_types=tuple(FULL if layer in attends else "mamba2" for layer in all_layers(config)),
        mamba2=read_heads(config.with_aliases(HYBRID_KEYS), norm_eps=norm_eps, groups=1),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        norm_eps=norm_eps,
    )


def read_granite_hybrid(architecture: str, config: JsonObject) -> ModelArch:
    """Granite 4 (IBM, 2025): Mamba 2 and attention, with Granite's multipliers; experts beside a dense MLP, or none."""
    config = either(config, {"layer_types": "layers_block_type"})
    kinds = _kinds(
        config, "layer_types", {**dict.fromkeys(_ATTENTION, FULL), **dict.fromkeys(_MAMBA, "mamba2")}
    )
    rotated = config.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    heads = read_heads(
        config.with_aliases(HYBRID_KEYS), norm_eps=config.number("rms_norm_eps", 1e-6, high=1.0), groups=1
    )
    size = config.integer("shared_intermediate_size", 1024, high=MAX_WIDTH)
    fields: dict[str, Any] = {"layer_types": kinds, "mamba2": heads}
    if not rotated:
        fields["rope"] = None
    if not config.integer("num_local_experts", 8, low=0):
        names = {**GRANITE_NAMES, "mlp": "shared_mlp"}
        return read_granite(
            architecture,
            config,
            names=CheckpointNames(names | STATE_NAMES, QKV_APART),
            intermediate_size=size,
            **fields,
        )
    experts = read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=all_layers(config),
        routing={"default_top_k": 2, "normalized": True},
        stack=ExpertStack(),
        shared_size=size,
    )
    return read_granite(
        architecture,
        config,
        names=CheckpointNames(GRANITE_NAMES | STATE_NAMES, QKV_APART),
        experts=experts,
        **fields,
    )


def read_nemotron_h(architecture: str, config: JsonObject) -> ModelArch:
    """Nemotron-H (NVIDIA, 2025, arXiv:2504.03624): each layer is Mamba 2, attention without positions or an MLP.

    In Nemotron 3 (NVIDIA, 2025) that MLP is sparse.
    """
    config.only("mlp_hidden_act", "relu2")
    kinds = _nemotron_kinds(config)
    config = config.with_values(num_hidden_layers=len(kinds))
    keys = {
        "num_heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state_size": "ssm_state_size",
        "hidden_act": "mamba_hidden_act",
        "use_bias": "mamba_proj_bias",
    }
    norm_eps = config.number("layer_norm_epsilon", 1e-5, high=1.0)
    limits = (config.number("time_step_min", 0.001), float("inf"))
    renamed = {**NAMES.renamed, "self_attn": "mixer", "mlp": "mixer", "shared_expert": "shared_experts"}
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(
            renamed,
            QKV_APART,
            unused=(r"^mtp\.",),
            adapters=CheckpointNames({**renamed, "model": "model"}, QKV_APART),
        ),
        block="mixer",
        layer_types=tuple("mlp" if kind == _SPARSE else kind for kind in kinds),
        experts=_nemotron_experts(config, kinds),
        mamba2=read_heads(config.with_aliases(keys), norm_eps=norm_eps, groups=8, time_limits=limits),
        default_head_dim=128,
        rope=None,
        norm_eps=norm_eps,
        **plain_mlp(config, "relu2", "mlp_hidden_act"),
    )


def _nemotron_experts(config: JsonObject, kinds: tuple[str, ...]) -> ExpertsArch | None:
    """Chosen as DeepSeek-V3's are, and without gates, as dense layers are."""
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _SPARSE)
    if not layers:
        return None
    return read_deepseek_experts(
        config.with_values(n_shared_experts=1),
        default_top_k=2,
        first=0,
        shared=1,
        normalized=True,
        shared_size=config.integer("moe_shared_expert_intermediate_size", 7688, high=MAX_WIDTH),
        layers=layers,
        gated=False,
        activation="relu2",
        latent_size=config.integer("moe_latent_size", 0, low=0, high=MAX_WIDTH),
    )


def _nemotron_kinds(config: JsonObject) -> tuple[str, ...]:
    """From a letter for each layer, or from words."""
    letters = {"M": "mamba2", "*": FULL, "-": "mlp", "E": _SPARSE}
    if "hybrid_override_pattern" in config:
        pattern = config.text("hybrid_override_pattern")
        if not set(pattern) <= set(letters):
            raise config.unsupported("hybrid_override_pattern", "made of M, *, - and E")
        return tuple(letters[letter] for letter in pattern)
    words = {
        **dict.fromkeys(_ATTENTION, FULL),
        **dict.fromkeys(_MAMBA, "mamba2"),
        "mlp": "mlp",
        "moe": _SPARSE,
    }
    return _kinds(config, "layers_block_type", words)


def _kinds(config: JsonObject, key: str, kinds: dict[str, str]) -> tuple[str, ...]:
    """Of each layer, by the words of the file; all are Mamba's if it has none."""
    words = config.texts(key) if key in config else [_MAMBA[0]] * config.integer("num_hidden_layers")
    if not set(words) <= kinds.keys():
        raise config.unsupported(key, f"a list of {', '.join(kinds)}")
    return tuple(kinds[word] for word in words)


def _every(
    config: JsonObject, period: str, default: int, offset: str, default_offset: int
) -> tuple[int, ...]:
    """The layers that come once in a period."""
    every = config.integer(period, default, high=MAX_LAYERS)
    first = config.integer(offset, default_offset, low=0, high=MAX_LAYERS)
    return tuple(layer for layer in all_layers(config) if layer % every == first)
