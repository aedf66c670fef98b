# SPDX-License-Identifier: Apache-2.0
"""Mamba models and hybrids of Mamba with attention.

Mamba 1 and 2, Falcon-H1 (TII, 2025, arXiv:2507.22448: attention and Mamba 2 in parallel), Jamba, Bamba, Granite 4,
Nemotron-H, PLaMo 2 (Preferred Networks, 2025, arXiv:2509.04897), and Zamba 2 (Glorioso et al., 2024, arXiv:2411.15242:
shared attention blocks).
"""

from __future__ import annotations

import math
from typing import Any

from quire.config.arch import (
    QKV_APART,
    CheckpointNames,
    ExpertsArch,
    ExpertStack,
    Mamba2Arch,
    MambaArch,
    ModelArch,
    ParallelAttentionMambaArch,
    PLaMo2MambaArch,
    SharedBlocksArch,
)
from quire.models.families.experts import all_layers, read_deepseek_experts, read_experts
from quire.models.families.fields import (
    GATED_ACTIVATIONS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    either,
    plain_mlp,
    read_arch,
    read_head_dim,
    read_llama,
)
from quire.models.families.granite import GRANITE_NAMES, read_granite
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING, read_rope

MAX_TAPS, MAX_STATES = 64, 256
POSITIONS = 1 << 17
"""Default context length: states have a fixed size at any length."""

NAMES = CheckpointNames(
    {
        "model": "backbone",
        "embed_tokens": "embeddings",
        "input_layernorm": "norm",
        "mamba": "mixer",
        "scan": "",
        "gated_norm": "norm",
        "norm": "norm_f",
    },
    merged={},
)


def read_mamba(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Mamba (Gu and Dao, 2023, arXiv:2312.00752); `fields` are set on its mixers."""
    mamba = read_channels(config, **fields)
    tied = config.flag("tie_word_embeddings", True)
    return _read(architecture, config, "mamba", mamba=mamba, tie_word_embeddings=tied)


def read_falcon_mamba(architecture: str, config: JsonObject) -> ModelArch:
    """Falcon Mamba (Zuo et al., 2024, arXiv:2410.05355): unweighted norms of dt, b and c."""
    eps = config.number("mixer_rms_eps", 1e-6, high=1.0)
    return read_mamba(architecture, config, norm_eps=eps, norm_weight=False)


def read_mamba2(architecture: str, config: JsonObject) -> ModelArch:
    """Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060), such as Codestral Mamba."""
    return _read(architecture, config, "mamba2", mamba2=read_heads(config, norm_eps=_eps(config), groups=8))


def read_channels(config: JsonObject, **fields: Any) -> MambaArch:
    """Read Mamba's mixer fields by its keys; `fields` are set by the caller."""
    config.only("hidden_act", "silu")
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    expand = config.integer("expand", 2, high=64)
    has_rank = config.get("time_step_rank") not in (None, "auto")
    return MambaArch(
        channels=fields.pop("channels", None)
        or config.integer("intermediate_size", expand * hidden, high=MAX_WIDTH),
        states=config.integer("state_size", 16, high=MAX_STATES),
        taps=config.integer("conv_kernel", 4, low=2, high=MAX_TAPS),
        rank=config.integer("time_step_rank", high=MAX_WIDTH) if has_rank else -(-hidden // 16),
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        **fields,
    )


def read_heads(
    config: JsonObject, *, norm_eps: float | None, groups: int, states: int = 128, **fields: Any
) -> Mamba2Arch:
    """Read Mamba 2's mixer fields by its keys; `groups` and `states` are defaults, `fields` are set by the caller."""
    config.only("hidden_act", "silu")
    heads = config.integer("num_heads", 128, high=MAX_HEADS)
    num_groups = config.integer("n_groups", groups, high=heads)
    if heads % num_groups:
        raise config.wrong("n_groups", f"a divisor of the number of heads ({heads})")
    expanded = config.integer("expand", 2, high=64) * config.integer("hidden_size", high=MAX_WIDTH)
    is_auto = config.get("head_dim") in (None, "auto")
    read = {"time_limits": read_time_limits(config)} | fields
    return Mamba2Arch(
        heads=heads,
        head_dim=expanded // heads if is_auto else config.integer("head_dim", high=MAX_WIDTH),
        groups=num_groups,
        states=config.integer("state_size", states, high=MAX_WIDTH),
        taps=config.integer("conv_kernel", 4, low=2, high=MAX_TAPS),
        norm_eps=norm_eps,
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        **read,
    )


def _read(architecture: str, config: JsonObject, kind: str, **fields: Any) -> ModelArch:
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return read_arch(
        architecture,
        config,
        names=NAMES,
        block="mixer",
        layer_types=(kind,) * num_layers,
        intermediate_size=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        max_position_embeddings=config.integer("max_position_embeddings", POSITIONS),
        norm_eps=_eps(config),
        **fields,
    )


def read_time_limits(config: JsonObject) -> tuple[float, float]:
    """Return the bounds of time steps. JSON has no infinity, and files write it in several ways."""
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    ends = [_number(end) for end in limits] if isinstance(limits, list) else []
    if len(ends) != 2 or None in ends:
        raise config.wrong("time_step_limit", "a list of two numbers")
    return ends[0], ends[1]  # type: ignore[return-value]


def _number(value: Any) -> float | None:
    if value == {"__float__": "Infinity"} or value == "Infinity":
        return math.inf
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _eps(config: JsonObject) -> float:
    return config.number("layer_norm_epsilon", 1e-5, high=1.0)


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
"""Keys that differ from Mamba's own files."""
_NORMS = {"post_attention_layernorm": "pre_ff_layernorm", "norm": "final_layernorm"}
STATE_NAMES = {"scan": "", "gated_norm": "norm"}
_ATTENTION, _MAMBA = ("attention", FULL), ("mamba", "linear_attention")
"""Names of each layer kind in files."""
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
    """Granite 4 (IBM, 2025): Mamba 2 and attention with Granite's multipliers; optional experts beside a dense MLP."""
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
    """Read experts routed as DeepSeek-V3's, without gates, as in the dense layers."""
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
    """Return layer kinds, from a letter per layer or from words."""
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
    """Return layer kinds from the file's words; all are Mamba's if there is no list."""
    words = config.texts(key) if key in config else [_MAMBA[0]] * config.integer("num_hidden_layers")
    if not set(words) <= kinds.keys():
        raise config.unsupported(key, f"a list of {', '.join(kinds)}")
    return tuple(kinds[word] for word in words)


def _every(
    config: JsonObject, period: str, default: int, offset: str, default_offset: int
) -> tuple[int, ...]:
    """Return the layers at an offset in each period."""
    every = config.integer(period, default, high=MAX_LAYERS)
    first = config.integer(offset, default_offset, low=0, high=MAX_LAYERS)
    return tuple(layer for layer in all_layers(config) if layer % every == first)


_NAMES = CheckpointNames(
    {
        **STATE_NAMES,
        "mixers": "",
        "mlp": "feed_forward",
        "post_attention_layernorm": "pre_ff_layernorm",
        "norm": "final_layernorm",
    }
)
_WIDTH = 1024
"""Default Mamba width if the key is missing; null means the usual Mamba 2 width."""


def read_falcon_h1(architecture: str, config: JsonObject) -> ModelArch:
    """Falcon-H1; its key multiplier is applied to scores, which is equivalent."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS))
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    return read_llama(
        architecture,
        config,
        names=_NAMES,
        head_dim=head_dim,
        layer_types=("attention_and_mamba2",) * len(all_layers(config)),
        mamba2=_read_mamba(config),
        parallel_attention_mamba=ParallelAttentionMambaArch(
            attention_in=_multiplier(config, "attention_in_multiplier"),
            attention_out=_multiplier(config, "attention_out_multiplier"),
            mamba_in=_multiplier(config, "ssm_in_multiplier"),
            mamba_out=_multiplier(config, "ssm_out_multiplier"),
        ),
        attention_scale=head_dim**-0.5 * _multiplier(config, "key_multiplier"),
        embedding_multiplier=_multiplier(config, "embedding_multiplier"),
        logits_multiplier=_multiplier(config, "lm_head_multiplier"),
        gate_multiplier=gate,
        mlp_multiplier=down,
        norm_eps=_falcon_h1_eps(config),
    )


def _read_mamba(config: JsonObject) -> Mamba2Arch:
    """Read mixers whose width has a key of its own, with or without a norm."""
    heads = config.integer("mamba_n_heads", 128, high=MAX_HEADS)
    expanded = config.integer("mamba_expand", 2, high=64) * config.integer("hidden_size", high=MAX_WIDTH)
    unsaid = expanded if "mamba_d_ssm" in config.values else _WIDTH
    width = config.integer("mamba_d_ssm", unsaid, high=MAX_WIDTH)
    if width % heads or config.get("mamba_d_head") not in (None, "auto", width // heads):
        raise config.wrong("mamba_d_head", f"mamba_d_ssm / mamba_n_heads ({width} / {heads})")
    normed = config.flag("mamba_rms_norm", False)
    return read_heads(
        config.with_values(mamba_d_head=width // heads).with_aliases(HYBRID_KEYS),
        norm_eps=_falcon_h1_eps(config) if normed else None,
        gate_after_norm=normed and config.flag("mamba_norm_before_gate", True),
        out_bias=config.flag("projectors_bias", False),
        groups=1,
        states=256,
        multipliers=_multipliers(config, "ssm_multipliers", 5),
    )


def _falcon_h1_eps(config: JsonObject) -> float:
    return config.number("rms_norm_eps", 1e-5, high=1.0)


def _multiplier(config: JsonObject, key: str) -> float:
    return config.number(key, 1.0)


def _multipliers(config: JsonObject, key: str, count: int) -> tuple[float, ...]:
    """Return the multipliers, all 1 if the file has none."""
    values = config.numbers(key) if key in config else (1.0,) * count
    if len(values) != count:
        raise config.wrong(key, f"a list of {count} numbers")
    return values


_PLAMO_MIXER = "plamo2_mamba"
_PLAMO_NAMES = CheckpointNames(
    {
        "layers": "layers.layers",
        "self_attn": "mixer",
        "mamba": "mixer",
        "q_norm": "q_weight",
        "k_norm": "k_weight",
        "x_proj": "bcdt_proj",
        "b_norm": "B_norm_weight",
        "c_norm": "C_norm_weight",
        "dt_norm": "dt_norm_weight",
        "scan": "",
        "input_layernorm": "pre_mixer_norm",
        "post_attention_layernorm": "post_mixer_norm",
        "pre_feedforward_layernorm": "pre_mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    },
    merged={},
)
_OFFSETS = {"post_attention_layernorm": 1 / 5, "post_feedforward_layernorm": 1 / 5**1.5}


def read_plamo2(architecture: str, config: JsonObject) -> ModelArch:
    """PLaMo 2: Mamba and attention alternate, each between two norms, as MLPs are; attention is windowed or full."""
    config.only("use_predefined_initial_state", False)
    return read_llama(
        architecture,
        config,
        names=_PLAMO_NAMES,
        block="sandwich",
        norm_offset=1.0,
        norm_offsets=_OFFSETS,
        head_dim=config.integer("hidden_size_per_head", 128, high=MAX_WIDTH),
        qk_norm="each_head_rms",
        layer_types=_layer_types(config),
        # The file counts tokens before the current one.
        sliding_window=config.integer("attention_window_size", 2048) + 1,
        plamo2_mamba=_read_plamo_mamba(config),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **biases(False),
    )


def _layer_types(config: JsonObject) -> tuple[str, ...]:
    """Return layer kinds: one in `mamba_step` layers attends, offset by half a period; in smaller models the last."""
    layers = all_layers(config)
    every = config.integer("mamba_step", 2, low=2, high=MAX_LAYERS)
    first = min(every // 2, len(layers) - 1)
    wide = config.numbers("full_attention_idx") if "full_attention_idx" in config else ()
    if not config.flag("mamba_enabled", True):
        every, first = 1, 0
    return tuple(
        _PLAMO_MIXER if layer % every != first else FULL if layer in wide else SLIDING for layer in layers
    )


def _read_plamo_mamba(config: JsonObject) -> PLaMo2MambaArch:
    return PLaMo2MambaArch(
        heads=config.integer("mamba_num_heads", 64, high=MAX_HEADS),
        head_dim=config.integer("hidden_size_per_head", 128, high=MAX_WIDTH),
        states=config.integer("mamba_d_state", 64, high=MAX_STATES),
        taps=config.integer("mamba_d_conv", 4, low=2, high=MAX_TAPS),
        rank=max(64, config.integer("hidden_size", high=MAX_WIDTH) // 16),
    )


_KEYS = {
    "num_heads": "n_mamba_heads",
    "head_dim": "",
    "n_groups": "mamba_ngroups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_bias": "add_bias_linear",
    "hidden_act": "",
    "time_step_limit": "",
}
"""Keys that differ from Mamba's own files, or have another meaning here."""
_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
_NORM_EPS = 1e-5
"""Epsilon of Mamba's norms, whatever the others' is."""


def read_zamba2(architecture: str, config: JsonObject) -> ModelArch:
    """Zamba 2; attention is twice as wide as hidden states, for it reads them beside the embeddings."""
    config.only("use_long_context", False)
    heads = config.integer("num_attention_heads", 32, high=MAX_HEADS)
    config.only("num_key_value_heads", heads)
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    head_dim, rest = divmod(2 * hidden, heads)
    if rest or head_dim % 2:
        raise config.wrong("num_attention_heads", f"such that each head has an even part of {2 * hidden}")
    shares = _shares(config)
    config = config.with_values(
        num_hidden_layers=len(shares), num_key_value_heads=heads, attention_bias=False
    )
    used = [layer for layer, has_block in enumerate(shares) if has_block]
    blocks = min(config.integer("num_mem_blocks", 1, high=MAX_LAYERS), len(used))
    rotated = config.flag("use_mem_rope", False)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(STATE_NAMES, QKV_APART, unused=tuple(map(_unused_of, used[blocks:]))),
        layer_types=tuple("attention_and_mamba2" if has_block else "mamba2" for has_block in shares),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim) if rotated else None,
        intermediate_size=config.integer("intermediate_size", 4 * hidden, high=MAX_WIDTH),
        hidden_act=config.choice("hidden_act", GATED_ACTIVATIONS, "gelu"),
        mlp_bias=config.flag("add_bias_linear", False),
        max_position_embeddings=config.integer("max_position_embeddings", 4096),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        norm_eps=config.number("rms_norm_eps", 1e-5, high=1.0),
        mamba2=read_heads(
            config.with_aliases(_KEYS),
            norm_eps=_NORM_EPS,
            groups=1,
            states=64,
            time_limits=(config.number("time_step_min", 0.001), float("inf")),
        ),
        shared_blocks=SharedBlocksArch(
            layers=tuple(used),
            count=blocks,
            adapter_rank=config.integer("adapter_rank", 128, high=MAX_WIDTH),
            adapts_attention=config.flag("use_shared_attention_adapter", False),
        ),
    )


def _shares(config: JsonObject) -> tuple[bool, ...]:
    """Return for each layer whether a shared block precedes it."""
    words = config.texts("layers_block_type")
    if not set(words) <= _KINDS.keys():
        raise config.unsupported("layers_block_type", f"a list of {', '.join(_KINDS)}")
    if not any(_KINDS[word] for word in words):
        raise config.unsupported("layers_block_type", "a list with a hybrid layer")
    return tuple(_KINDS[word] for word in words)


def _unused_of(layer: int) -> str:
    """Return a pattern of the repeated copies of a shared block."""
    return rf"\.layers\.{layer}\.shared_transf(ormer)?\."
