"""Mamba and what came of it: models of layers that keep a state, and of nothing else."""

from __future__ import annotations

import math
from typing import Any

from quire.config.arch import CheckpointNames, Mamba2Arch, MambaArch, ModelArch
from quire.models.families.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, read_arch
from quire.models.json_object import JsonObject

MAX_TAPS, MAX_STATES = 64, 256
POSITIONS = 1 << 17
"""Length of the longest sequence, where the file says nothing: states are of one size, whatever they have seen."""

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
    """Mamba (Gu and Dao, 2023, arXiv:2312.00752); `fields` are of its mixers."""
    mamba = read_channels(config, **fields)
    tied = config.flag("tie_word_embeddings", True)
    return _read(architecture, config, "mamba", mamba=mamba, tie_word_embeddings=tied)


def read_falcon_mamba(architecture: str, config: JsonObject) -> ModelArch:
    """Falcon Mamba (Zuo et al., 2024, arXiv:2410.05355): norms without weights of what chooses a step."""
    eps = config.number("mixer_rms_eps", 1e-6, high=1.0)
    return read_mamba(architecture, config, norm_eps=eps, norm_weight=False)


def read_mamba2(architecture: str, config: JsonObject) -> ModelArch:
    """Mamba 2 (Dao and Gu, 2024, arXiv:2405.21060), such as Codestral Mamba."""
    return _read(architecture, config, "mamba2", mamba2=read_heads(config, norm_eps=_eps(config), groups=8))


def read_channels(config: JsonObject, **fields: Any) -> MambaArch:
    """Mixers of Mamba, by its keys; `fields` are those that are not read."""
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
    """Mixers of Mamba 2, by its keys; `groups` and `states` are defaults, and `fields` are those that are not read."""
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
    """What time steps are held to. JSON knows no infinity, and files write one in several ways."""
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
