"""OLMo (Groeneveld et al., 2024, arXiv:2402.00838), OLMo 2 (arXiv:2501.00656) and OLMo 3 (2025)."""

from __future__ import annotations

from typing import Any

from quire.config.arch import ModelArch
from quire.models.families.fields import (
    alternating_window,
    optional_number,
    read_head_dim,
    read_llama,
    rms_eps,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import SLIDING, read_rope


def read_olmo(architecture: str, config: JsonObject) -> ModelArch:
    """Layer norms without weights; q, k and v may be clipped."""
    return read_llama(
        architecture,
        config,
        norm="layer",
        norm_eps=1e-5,
        norm_weight=False,
        norm_bias=False,
        qkv_clip=optional_number(config, "clip_qkv", None),
    )


def read_olmo2(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Norms behind attention and MLP, and of all of q and all of k."""
    norms = {"block": "norm_after", "qk_norm": "row_rms", "norm_eps": rms_eps(config, 1e-5)}
    return read_llama(architecture, config, **(norms | fields))


def read_olmo3(architecture: str, config: JsonObject) -> ModelArch:
    """A window on three of four layers, whose rotary embedding is not stretched."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    plain = config.with_values(rope_scaling=None)
    return read_olmo2(
        architecture,
        config,
        rope=read_rope(config, head_dim=head_dim, theta=5e5),
        rope_local=read_rope(plain, head_dim=head_dim, theta=5e5, layer_type=SLIDING),
        **alternating_window(config, period=4),
    )
