"""Hunyuan dense (Tencent, 2025): norms of q and k after the rotation, and a rotary base stretched once for all."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import read_head_dim, read_llama, rms_eps
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope


def read_hunyuan(
    architecture: str, config: JsonObject, names: Mapping[str, str] = MappingProxyType({}), **fields: Any
) -> ModelArch:
    """Its layers do not share keys and values (`use_cla`), and all norm q and k; `names` are more that differ."""
    config.only("use_cla", False)
    config.only("use_qk_norm", True)
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"q_norm": "query_layernorm", "k_norm": "key_layernorm", **names}),
        head_dim=head_dim,
        rope=read_rope(_with_theta(config, head_dim), head_dim=head_dim),
        qk_norm="rms_after_rope",
        norm_eps=rms_eps(config, 1e-5),
        **fields,
    )


def _with_theta(config: JsonObject, head_dim: int) -> JsonObject:
    """`alpha` stands for a larger base, by the exponent of NTK-aware scaling, whatever the length."""
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope = config.child(key)
    alpha = rope.optional_number("alpha", low=1e-6, high=1e9)
    if alpha is None:
        return config
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0, low=1.0), low=1.0)
    stretched = theta * alpha ** (head_dim / max(head_dim - 2, 1))
    return config.with_values(**{key: {"rope_type": "default", "rope_theta": stretched}})
